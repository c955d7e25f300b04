"""Recorded streams in the clients' own parsers, cut at every byte: what a client reads cannot depend on the cuts."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic._streaming
import httpx
import huggingface_hub.inference._common as huggingface
import openai._streaming
import pytest

from tests.clients.recording import FOLDER, STREAMS, opened, stream, texts
from tests.e2e.server import Server

Read = Callable[[Iterator[bytes]], list[Any]]


def sse(decoder: Any) -> Read:
    return lambda chunks: [event.data for event in decoder().iter_bytes(chunks)]


def lines(chunks: Iterator[bytes]) -> list[str]:
    return list(httpx.Response(200, content=chunks).iter_lines())


def messages(chunks: Iterator[bytes]) -> list[str]:
    client, found = opened(), []
    for chunk in chunks:
        client.receive_data(chunk)
        found += texts(client)
    return found


READERS: dict[str, Read] = {
    "anthropic": sse(anthropic._streaming.SSEDecoder),
    "ollama": lambda chunks: [json.loads(line) for line in lines(chunks)],  # as ollama.Client does
    "openai": sse(openai._streaming.SSEDecoder),
    "completions": sse(openai._streaming.SSEDecoder),
    "websocket": messages,
    "responses": sse(openai._streaming.SSEDecoder),
    "tgi": lambda chunks: list(huggingface._stream_text_generation_response(lines(chunks), True)),
    "kserve": sse(openai._streaming.SSEDecoder),
}


@pytest.mark.parametrize("wire", STREAMS)
def test_a_stream_is_read_however_it_is_cut(wire: str) -> None:
    data, read = (FOLDER / f"{wire}.bin").read_bytes(), READERS[wire]
    assert any(byte > 127 for byte in data) or b"\\u" in data  # a cut can be within a character
    whole = read(iter([data]))
    assert len(whole) > 3
    assert read(bytes([byte]) for byte in data) == whole
    for cut in range(1, len(data)):
        assert read(iter([data[:cut], data[cut:]])) == whole


def shapes(wire: str, data: bytes) -> set[str]:
    """The forms of a stream's objects: the names and types of their fields."""

    def shape(value: Any, field: str = "") -> Any:
        if field == "top_logprobs":  # of a completion: texts of the likely tokens, one or two
            return sorted({type(score).__name__ for scores in value for score in scores.values()})
        if isinstance(value, dict):
            return {name: shape(item, name) for name, item in value.items() if name != "type"} | {
                "type": str(value.get("type"))
            }
        return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__

    if wire == "websocket":
        found = messages(iter([data]))
    else:
        found = [line.removeprefix("data: ") for line in data.decode().splitlines() if not line.startswith("event: ")]
    return {json.dumps(shape(json.loads(text))) for text in found if text not in ("", "[DONE]")}


@pytest.mark.parametrize("wire", STREAMS)
def test_the_server_still_sends_what_was_recorded(server: Server, wire: str) -> None:
    recorded = (FOLDER / f"{wire}.bin").read_bytes()
    assert shapes(wire, stream(server.url, wire)) == shapes(wire, recorded)
