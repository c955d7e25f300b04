"""The streams of both kinds of providers, however they are cut, and what is no such stream."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.errors import ProviderFailed
from penstock.frontend.providers.event_stream import MOST_BYTES, EventStream
from penstock.frontend.providers.wires.anthropic import AnthropicReader
from penstock.frontend.providers.wires.openai import OpenAIReader
from penstock.frontend.providers.wires.parts import UNREADABLE, Counts, Ending
from tests.frontend.providers.streams import OPENAI_TEXT, SAID, STREAMS, delta, sse

READERS = {"openai": OpenAIReader, "anthropic": AnthropicReader}
COUNTS = {"openai": Counts(1000, 600, 50, 20), "anthropic": Counts(1000, 600, 50)}
KINDS = pytest.mark.parametrize("kind", READERS)


def read(kind: str, chunks: list[bytes]) -> tuple[list[Any], Any]:
    """The blocks of a message, with its endings, and the reader."""
    events, reader, blocks = EventStream(), READERS[kind](), []
    for chunk in chunks:
        for data in events.push(chunk):
            for each in reader.read(data):
                if isinstance(each, Ending):
                    blocks.append(each)
                    continue
                part = each.part
                key = (part.kind, part.call)
                if part.kind == "call":
                    blocks.append([key, (part.text, part.id)])
                elif blocks and blocks[-1][0] == key:
                    blocks[-1][1] += part.text
                else:
                    blocks.append([key, part.text])
    return blocks, reader


def expected_calls(prefix: str) -> list[Any]:
    return [
        [("reasoning", -1), "Hm, rain."],
        [("content", -1), "I look."],
        [("call", 0), ("now", f"{prefix}_now")],
        [("arguments", 0), '{"a": "Köln"}'],
        [("call", 1), ("then", f"{prefix}_then")],
        [("arguments", 1), "{}"],
        Ending(0, "stop"),
    ]


@KINDS
def test_every_cut_gives_the_same_message(kind: str) -> None:
    text, calls = STREAMS[kind]
    for whole, wanted in (
        (text, [[("content", -1), SAID], Ending(0, "stop")]),
        (calls, expected_calls("call" if kind == "openai" else "toolu")),
    ):
        for chunks in ([whole[:at], whole[at:]] for at in range(len(whole) + 1)):
            found, reader = read(kind, chunks)
            assert found == wanted
            assert reader.complete and reader.counts == COUNTS[kind]
        assert read(kind, [bytes([byte]) for byte in whole])[0] == wanted
        assert read(kind, [whole.replace(b"\n", b"\r\n")])[0] == wanted


@KINDS
@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 3000), max_size=12))
def test_any_cuts_give_the_same_message(kind: str, cuts: list[int]) -> None:
    whole = STREAMS[kind][1]
    places = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    chunks = [whole[a:b] for a, b in pairwise(places)]
    assert read(kind, chunks)[0] == read(kind, [whole])[0]


@KINDS
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_changed_events_are_read_or_refused(kind: str, data: st.DataObject) -> None:
    """A value anywhere in the stream becomes another one: no other exception than those that say so."""
    whole = STREAMS[kind][1]
    events = [line.removeprefix(b"data: ") for line in whole.split(b"\n") if line.startswith(b"data: {")]
    event = json.loads(events[data.draw(st.integers(0, len(events) - 1))])
    place: Any = event
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(st.sampled_from([None, 0, -1, "x", [], {}, [1], 1.5, True]))
    try:
        for each in READERS[kind]().read(json.dumps(event).encode()):
            assert isinstance(each, Ending) or isinstance(each.part.text, str)
    except (ProviderFailed, *UNREADABLE):
        pass


def test_a_line_that_never_ends_is_refused() -> None:
    for piece in (b"x" * (1 << 17), b"data: " + b"x" * 1000 + b"\n"):
        events, size = EventStream(), 0
        while size < MOST_BYTES - (1 << 18):
            assert not events.push(piece)
            size += len(piece)
        with pytest.raises(ProviderFailed, match=f"more than {MOST_BYTES} bytes"):
            events.push(piece * (1 + (1 << 19) // len(piece)))


def test_errors_within_streams_and_several_choices() -> None:
    with pytest.raises(ProviderFailed, match="error: overloaded now"):
        OpenAIReader().read(b'{"error": {"message": "overloaded  now", "type": "server_error"}}')
    with pytest.raises(ProviderFailed, match="Overloaded"):
        AnthropicReader().read(b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}')
    stream = sse(delta(content="a", index=1), delta(content="b"), delta("length"), delta("content_filter", index=1))
    found, reader = read("openai", [stream])
    assert found[-2:] == [Ending(0, "length"), Ending(1, "content_filter")] and not reader.complete
    assert read("openai", [sse(*OPENAI_TEXT[:-2], "[DONE]")])[1].counts == Counts()
