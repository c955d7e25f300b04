"""Streams of OpenAI's and Anthropic's APIs, in the shapes that their references and their Python packages' types have,
with words of ours. Each has content, reasoning and two calls where the API can give them."""

import json
from typing import Any

CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-5-mini"}
SAID = "Köln 🌧 – ja."
USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 50,
    "total_tokens": 1050,
    "prompt_tokens_details": {"cached_tokens": 600, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 20, "audio_tokens": 0},
}


def sse(*events: Any, named: bool = False, end: str = "\n") -> bytes:
    lines = []
    for event in events:
        if named:
            lines.append(f"event: {event['type']}{end}")
        lines.append(f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}{end}{end}")
    return "".join(lines).encode()


def delta(finish: str | None = None, index: int = 0, **fields: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": fields, "logprobs": None, "finish_reason": finish}
    return {**CHUNK, "choices": [choice], "usage": None}


def function(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    called = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    head = {} if name is None else {"id": f"call_{name}", "type": "function"}
    return {"index": index, **head, "function": called}


OPENAI_TEXT = [
    delta(role="assistant", content="", refusal=None),
    *(delta(content=part) for part in ("Köln ", "🌧", " – ja.")),
    delta("stop"),
    {**CHUNK, "choices": [], "usage": USAGE},
    "[DONE]",
]
OPENAI_CALLS = [
    delta(role="assistant", content=None),
    delta(reasoning_content="Hm, "),
    delta(reasoning_content="rain."),
    delta(content="I look."),
    delta(tool_calls=[function(0, "", "now")]),
    delta(tool_calls=[function(0, '{"a": "K')]),
    delta(tool_calls=[function(0, 'öln"}')]),
    delta(tool_calls=[function(1, "{}", "then")]),
    delta("tool_calls"),
    {**CHUNK, "choices": [], "usage": USAGE},
    "[DONE]",
]
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-haiku-4-5",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {
        "input_tokens": 400,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 600,
        "output_tokens": 1,
    },
}


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": each} for each in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def text_block(index: int, *texts: str) -> list[dict[str, Any]]:
    return block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": text} for text in texts))


def call_block(index: int, name: str, *pieces: str) -> list[dict[str, Any]]:
    start = {"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": {}}
    return block(index, start, *({"type": "input_json_delta", "partial_json": piece} for piece in pieces))


def ended(reason: str) -> list[dict[str, Any]]:
    stop = {"stop_reason": reason, "stop_sequence": None}
    return [{"type": "message_delta", "delta": stop, "usage": {"output_tokens": 50}}, {"type": "message_stop"}]


ANTHROPIC_TEXT = [
    {"type": "message_start", "message": MESSAGE},
    {"type": "ping"},
    *text_block(0, "Köln ", "🌧", " – ja."),
    *ended("end_turn"),
]
ANTHROPIC_CALLS = [
    {"type": "message_start", "message": MESSAGE},
    *block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Hm, "},
        {"type": "thinking_delta", "thinking": "rain."},
        {"type": "signature_delta", "signature": "c2ln"},
    ),
    *text_block(1, "I look."),
    *call_block(2, "now", "", '{"a": "K', 'öln"}'),
    *call_block(3, "then", "{}"),
    *ended("tool_use"),
]
# By kind: the stream of a text, and that of a message with reasoning and calls.
STREAMS = {
    "openai": (sse(*OPENAI_TEXT), sse(*OPENAI_CALLS)),
    "anthropic": (sse(*ANTHROPIC_TEXT, named=True), sse(*ANTHROPIC_CALLS, named=True)),
}
