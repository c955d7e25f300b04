"""Streams of a real server, byte for byte, one for each wire.

penstock serve --served-model-name smollm2 &
python -m tests.clients.recording http://127.0.0.1:8000        writes them anew
"""

import sys
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).parent / "recorded"
_QUESTION = [{"role": "user", "content": "Greet with an emoji: 🌧 é"}]
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
    "kserve": ("/v2/models/smollm2/generate_stream", {"text_input": "Rain: 🌧", "max_tokens": 8, "temperature": 0}),
}


def stream(url: str, wire: str) -> bytes:
    """The bytes of a wire's stream."""
    path, body = STREAMS[wire]
    if wire in ("anthropic", "ollama", "openai", "responses"):
        body = {"model": "smollm2", "stream": True, **body}
    return httpx.post(url + path, json=body, timeout=60).raise_for_status().content


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for wire in STREAMS:
        (FOLDER / f"{wire}.bin").write_bytes(stream(sys.argv[1], wire))
