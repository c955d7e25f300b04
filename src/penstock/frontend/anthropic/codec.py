"""Encodes messages and their streams as Anthropic does."""

from typing import Any

import orjson

from penstock.frontend.answer import Codec, CollectedChoice
from penstock.frontend.anthropic.errors import error_body
from penstock.frontend.call import ModelContext
from penstock.frontend.errors import APIError
from penstock.frontend.generation import ChoiceUpdate, Usage
from penstock.frontend.http.sse import sse_event
from penstock.frontend.requests.reply import ReplyReader, join_parts, read_parts
from penstock.frontend.requests.tools import parse_arguments
from penstock.text.calls import Part

SIGNATURE = "bm90IHNpZ25lZA=="  # thinking is not signed, but clients drop a block without a signature
_PING = sse_event(b'{"type":"ping"}', b"ping")
_NO_EDITS: dict[str, Any] = {"context_management": {"applied_edits": []}}
_DELTAS = {
    "content": b'"text_delta","text":',
    "reasoning": b'"thinking_delta","thinking":',
    "arguments": b'"input_json_delta","partial_json":',
}


class MessageCodec(Codec):
    """A message has text, thinking and tool_use blocks. In a stream, each has a start, deltas and a stop."""

    heartbeat = _PING

    def __init__(
        self, context: ModelContext, reader: ReplyReader | None, *, thinking: bool, shortened: bool, edits: bool
    ) -> None:
        """`reader` divides the text; without it, all text is content. `thinking`: the message shows reasoning.
        `shortened`: the context allows fewer tokens than the request's limit. `edits`: the request has edits of the
        context, and the message says that none was applied."""
        self._reader = reader
        self._thinking = thinking
        self._shortened = shortened
        self._edits = _NO_EDITS if edits else {}
        self._head = {"id": f"msg_{context.id}", "type": "message", "role": "assistant", "model": context.model.name}
        self._index = -1  # of the latest block
        self._open = ""  # its kind if it has no stop yet
        self._end = b""

    def opening(self, usage: Usage) -> bytes:
        rest: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **rest, "usage": {**_usage_fields(usage), "output_tokens": 0}}
        return _event(b"message_start", {"message": message}) + _PING

    def chunk(self, update: ChoiceUpdate, usage: Usage) -> bytes:
        ended = update.finish_reason is not None
        events = []
        for part in read_parts(self._reader, update, ended=ended):
            if part.kind != "reasoning" or self._thinking:
                events.append(self._part(part))
        if ended:
            events.append(self._close())
            self._end = orjson.dumps(self._stop_fields(update))
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        rest = orjson.dumps({"usage": self._usage(usage), **self._edits})
        delta = b'{"type":"message_delta","delta":' + self._end + b"," + rest[1:]
        return sse_event(delta, b"message_delta") + _event(b"message_stop", {})

    def failure(self, error: APIError) -> bytes:
        return sse_event(error_body(error), b"error")

    def whole(self, answers: list[CollectedChoice], usage: Usage) -> bytes:
        (answer,) = answers
        content = []
        for block in join_parts(read_parts(self._reader, answer, ended=True)):
            match block.kind:
                case "content":
                    content.append({"type": "text", "text": block.text})
                case "reasoning" if self._thinking:
                    content.append({"type": "thinking", "thinking": block.text, "signature": SIGNATURE})
                case "call":
                    content.append(_tool_use(block.id, block.name, parse_arguments(block.text)))
        message = {**self._head, "content": content, **self._stop_fields(answer), "usage": self._usage(usage)}
        return orjson.dumps(message | self._edits)

    def _part(self, part: Part) -> bytes:
        """The events of a part: those that change the block, if it starts one, and its delta."""
        if part.kind == "call":
            return self._close() + self._start("arguments", _tool_use(part.id, part.text, {}))
        start = b""
        if part.kind != self._open:
            start = self._close()
            if part.kind == "content":
                start += self._start("content", {"type": "text", "text": ""})
            else:
                start += self._start("reasoning", {"type": "thinking", "thinking": "", "signature": ""})
        return start + self._delta(_DELTAS[part.kind], part.text)

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        return _event(b"content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, kind: bytes, text: str) -> bytes:
        return b"".join(
            (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % self._index,
                *(b'"delta":{"type":', kind, orjson.dumps(text), b"}}\n\n"),
            )
        )

    def _close(self) -> bytes:
        """The events that end the open block, if one is open."""
        if not self._open:
            return b""
        signature = self._delta(b'"signature_delta","signature":', SIGNATURE) if self._open == "reasoning" else b""
        self._open = ""
        return signature + _event(b"content_block_stop", {"index": self._index})

    def _stop_fields(self, source: ChoiceUpdate | CollectedChoice) -> dict[str, Any]:
        reason = "end_turn"
        if source.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._shortened else "max_tokens"
        elif self._reader is not None and self._reader.called(source.choice):
            reason = "tool_use"
        elif source.stopped is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": source.stopped}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        fields = _usage_fields(usage)
        if self._reader is not None and self._reader.reasoning_tokens is not None:
            fields["output_tokens_details"] = {"thinking_tokens": self._reader.reasoning_tokens}
        return fields


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _usage_fields(usage: Usage) -> dict[str, Any]:
    """The prompt's tokens are those that were computed and those that were cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(name: bytes, fields: dict[str, Any]) -> bytes:
    return sse_event(orjson.dumps({"type": name.decode(), **fields}), name)
