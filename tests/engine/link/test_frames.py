"""Frames over a socket that gives them in any pieces, and takes them in any."""

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.link.frames import Frames


@pytest.fixture
def ends() -> Iterator[tuple[Frames, Frames]]:
    one, other = map(Frames, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_frames_arrive_whole_in_order_and_as_many_as_asked_for(ends: tuple[Frames, Frames]) -> None:
    one, other = ends
    assert other.receive(4) == []
    frames = [b"", b"a", bytes(range(256)) * 20, b"z"]
    for frame in frames:
        one.send(frame)
    assert not one.unsent
    assert other.receive(3) == frames[:3]
    assert other.receive(3) == frames[3:]
    assert other.receive(3) == []


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(1, 9), min_size=1))
def test_pieces_do_not_matter(frames: list[bytes], sizes: list[int]) -> None:
    plain, end = socket.socketpair()
    other = Frames(end)
    data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    received = []
    for i in range(len(data)):
        size = sizes[i % len(sizes)]
        plain.sendall(data[:size])
        data = data[size:]
        received += other.receive(100)
    assert received == frames
    plain.close()
    other.close()


def test_what_does_not_fit_waits_and_loses_nothing(ends: tuple[Frames, Frames]) -> None:
    one, other = ends
    frames = [bytes([i]) * 300_000 for i in range(8)]
    for frame in frames:
        one.send(frame)
    assert one.unsent
    received: list[bytes] = []
    while len(received) < len(frames):
        received += other.receive(1)
        one.flush()
    assert received == frames and one.flush() and not one.unsent


def test_the_end_comes_after_what_was_said(ends: tuple[Frames, Frames]) -> None:
    one, other = ends
    one.send(b"last words")
    one.close()
    assert other.receive(9) == [b"last words"]
    for _ in range(2):
        with pytest.raises(EOFError):
            other.receive(9)
    other.send(b"to nobody")
    assert not other.unsent


def test_half_a_frame_at_the_end_is_none() -> None:
    plain, end = socket.socketpair()
    other = Frames(end)
    plain.sendall(b"\x09\0\0\0half")
    plain.close()
    with pytest.raises(EOFError):
        other.receive(1)
    other.close()
