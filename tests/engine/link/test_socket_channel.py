"""The engine's end of the socket: a client that does not read costs neither the engine's time nor its memory."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.engine.link.channel import COMMANDS_AT_ONCE
from penstock.engine.link.frames import Frames
from penstock.engine.link.socket_channel import LINGER_SECONDS, SocketChannel
from penstock.engine.link.wire import Abort, Ended, Event, Step, Stop, decode_event, encode
from penstock.messages import EngineStats, TokenDelta
from tests.patience import wait_for

STEPS = 2000


class Client:
    """A client that reads when the test does."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._frames = Frames(end)

    def recv(self) -> bytes:
        """The next frame; waits for it."""
        return wait_for(lambda: self._frames.receive(1), "a frame", tick=0.001)[0]

    def send(self, frame: bytes) -> None:
        self._frames.send(frame)


@pytest.fixture
def ends() -> Iterator[tuple[SocketChannel, Client]]:
    """An engine's port and its client."""
    one, other = socket.socketpair()
    port = SocketChannel(one)
    yield port, Client(other)
    other.close()
    port.close()


def step(number: int) -> Step:
    return Step(
        EngineStats(steps=number), [TokenDelta("a", 0, number, (number,)), TokenDelta("b", 1, number, (number,))]
    )


def read_until(client: Client, port: SocketChannel, last: int) -> list[Step]:
    steps: list[Step] = []
    while not steps or steps[-1].stats.steps < last:
        event: Event = decode_event(client.recv())
        assert isinstance(event, Step)
        steps.append(event)
        port.receive(wait=0.0)
    return steps


def test_what_the_client_does_not_take_is_merged(ends: tuple[SocketChannel, Client]) -> None:
    port, client = ends
    for number in range(STEPS):
        port.post(step(number))
    steps = read_until(client, port, STEPS - 1)
    assert len(steps) < STEPS / 2
    for choice in (0, 1):
        tokens = [token for one in steps for delta in one.deltas if delta.choice == choice for token in delta.token_ids]
        assert tokens == list(range(STEPS))


def test_the_merged_rest_leaves_while_the_engine_sleeps(ends: tuple[SocketChannel, Client]) -> None:
    port, client = ends
    for number in range(STEPS):
        port.post(step(number))
    commands = []
    sleeper = threading.Thread(target=lambda: commands.extend(port.receive(wait=60.0)))
    sleeper.start()
    events = []
    while not events or events[-1].stats.steps < STEPS - 1:
        events.append(decode_event(client.recv()))
    assert sleeper.is_alive()
    client.send(encode(Abort("a")))
    sleeper.join(30)
    assert commands == [Abort("a")]


def test_garbage_is_skipped(ends: tuple[SocketChannel, Client]) -> None:
    port, client = ends
    port.announce(Ended("hello"))
    client.recv()
    client.send(b"garbage")
    client.send(encode(Abort("a")))
    commands = []
    while not commands:
        commands = port.receive(wait=60.0)
    assert commands == [Abort("a")]


def test_a_client_that_never_reads_does_not_keep_the_engine_alive(ends: tuple[SocketChannel, Client]) -> None:
    port, _ = ends
    for number in range(STEPS):
        port.post(step(number))
    began = time.monotonic()
    port.announce(Ended("nobody reads this"))
    assert time.monotonic() - began >= LINGER_SECONDS / 2
    assert len(port.receive(wait=0.0)) == 0


def test_more_commands_than_are_taken_at_once_are_not_slept_upon(ends: tuple[SocketChannel, Client]) -> None:
    port, client = ends
    for _ in range(COMMANDS_AT_ONCE + 3):
        client.send(encode(Abort("a")))
    assert len(port.receive(wait=60.0)) == COMMANDS_AT_ONCE
    assert len(port.receive(wait=60.0)) == 3


def test_a_client_that_is_gone_ends_the_engine(ends: tuple[SocketChannel, Client]) -> None:
    port, client = ends
    client.send(encode(Abort("a")))
    client.end.close()
    assert port.receive(wait=60.0) == [Abort("a")]
    assert port.receive(wait=60.0) == [Stop("the client is gone")]
    port.post(step(1))
