"""Streams of a real server, byte for byte, one for each wire.

penstock serve --served-model-name smollm2 &
python -m tests.clients.recording http://127.0.0.1:8000 [WIRE...]    writes all, or these, anew
"""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

FOLDER = Path(__file__).parent / "recorded"
_QUESTION = [{"role": "user", "content": "Greet with an emoji: 🌧 é"}]
SOCKET = "/v1/chat/ws"
_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Köln"]}}, "required": ["city"]}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "anthropic": (
        "/v1/messages",
        {
            "messages": _QUESTION,
            "tools": [{"name": "weather", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "any"},
            "max_tokens": 40,
            "temperature": 0,
        },
    ),
    "ollama": ("/api/chat", {"messages": _QUESTION, "options": {"num_predict": 10, "temperature": 0}}),
    "openai": ("/v1/chat/completions", {"messages": _QUESTION, "max_tokens": 8, "temperature": 0}),
    "completions": (
        "/v1/completions",
        {
            "prompt": "A cloud: 🌧 é. Rain: 🌧",
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
            "stream_options": {"include_usage": True},
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "Greet with an emoji: 🌧 é",
            "tools": [{"type": "function", "name": "weather", "parameters": _SCHEMA}],
            "tool_choice": "required",
            "max_output_tokens": 40,
            "temperature": 0,
            "store": False,
        },
    ),
    "tgi": ("/generate_stream", {"inputs": "A cloud: 🌧 é. Rain: 🌧", "parameters": {"max_new_tokens": 8}}),
    "websocket": (SOCKET, {"messages": _QUESTION, "max_tokens": 8, "temperature": 0, "stream": True}),
    "kserve": ("/v2/models/smollm2/generate_stream", {"text_input": "Rain: 🌧", "max_tokens": 8, "temperature": 0}),
}


def stream(url: str, wire: str) -> bytes:
    """The bytes of a wire's stream."""
    path, body = STREAMS[wire]
    if path == SOCKET:
        return _socket_stream(url, body)
    if wire in ("anthropic", "completions", "ollama", "openai", "responses"):
        body = {"model": "smollm2", "stream": True, **body}
    return httpx.post(url + path, json=body, timeout=60).raise_for_status().content


def opened(url: str = "http://127.0.0.1:8000") -> ClientProtocol:
    """A client of a WebSocket that does no I/O and has sent its handshake, which is always the same."""
    client = ClientProtocol(parse_uri(url.replace("http", "ws") + SOCKET))
    client.key = "dGhlIHNhbXBsZSBub25jZQ=="  # of RFC 6455
    client.send_request(client.connect())
    return client


def texts(client: ClientProtocol) -> Iterator[str]:
    """The messages that have come since the last call."""
    for event in client.events_received():
        if isinstance(event, Frame) and event.opcode is Opcode.TEXT:
            yield bytes(event.data).decode()


def _socket_stream(url: str, body: dict[str, Any]) -> bytes:
    """All that the server sends on a socket with one request: the handshake, the events, the close."""
    client, data, asked = opened(url), b"", False
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
        while True:
            for sent in client.data_to_send():
                connection.sendall(sent)
            if not (got := connection.recv(65536)):
                return data
            data += got
            client.receive_data(got)
            if any(json.loads(text)["type"] == "done" for text in texts(client)):
                client.send_close(1000)
            elif client.state.name == "OPEN" and not asked:
                client.send_text(json.dumps({"id": "1", "body": body}).encode())
                asked = True


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for wire in sys.argv[2:] or STREAMS:
        (FOLDER / f"{wire}.bin").write_bytes(stream(sys.argv[1], wire))
