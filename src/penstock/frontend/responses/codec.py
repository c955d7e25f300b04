"""Encodes responses and their streams as OpenAI does."""

import time
from typing import Any

import orjson

from penstock.frontend.answer import Codec, CollectedChoice
from penstock.frontend.errors import APIError
from penstock.frontend.generation import ChoiceUpdate, Usage
from penstock.frontend.http.sse import sse_event
from penstock.frontend.requests.reply import ReplyReader, join_parts, read_parts
from penstock.text.calls import Part


class ResponseCodec(Codec):
    """A response has items: reasoning, messages and function calls. In a stream, each has events from its addition to
    its end, and every event has a sequence number."""

    def __init__(self, answer_id: str, fields: dict[str, Any], reader: ReplyReader | None) -> None:
        """`fields` are those of the response that the request determines. `reader` divides the text; without it, all
        text is content."""
        self._id = answer_id
        self._fields = fields
        self._reader = reader
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the item that is open
        self._open = ""  # the kind of the last item if it has no end yet
        self._where = b""  # the fields of its deltas that say where they belong
        self._length = False  # the answer was cut by its limit
        self._ends: dict[str, Any] = {}  # the complete response
        self._streamed = False
        self.output = self.rest = b""  # the items of the complete response, and its other fields, as JSON

    def opening(self, usage: Usage) -> bytes:
        self._streamed = True
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, update: ChoiceUpdate, usage: Usage) -> bytes:
        ended = update.finish_reason is not None
        events = [self._part(part) for part in read_parts(self._reader, update, ended=ended)]
        if ended:
            self._length = update.finish_reason == "length"
            events.append(self._close(complete=not self._length))
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        self._ended(usage)
        return self._closing_event()

    def unstored(self) -> bytes:
        """The bytes that end a complete answer, for a response that could not be stored."""
        self._ends["store"] = False
        if not self._streamed:
            return orjson.dumps(self._ends)
        self._sequence -= 1  # it takes the place of the event that says that it is stored
        return self._closing_event()

    def failure(self, error: APIError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", None)
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    def whole(self, answers: list[CollectedChoice], usage: Usage) -> bytes:
        (answer,) = answers
        self._length = answer.finish_reason == "length"
        blocks = join_parts(read_parts(self._reader, answer, ended=True))
        for i, block in enumerate(blocks):
            cut = self._length and i == len(blocks) - 1
            kind = "arguments" if block.kind == "call" else block.kind
            item = self._new_item(kind, block.name, block.id)
            self._items.append(_filled(item, kind, block.text, "incomplete" if cut else "completed"))
        self._ended(usage)
        return self.rest[:-1] + b',"output":' + self.output + b"}"

    def _part(self, part: Part) -> bytes:
        """The events of a part: those that end an item and begin the next, if it does, and its delta."""
        if part.kind == "call":
            return self._close() + self._begin("arguments", part.text, part.id)
        start = b"" if part.kind == self._open else self._close() + self._begin(part.kind)
        self._texts.append(part.text)
        return start + self._delta(part.text)

    def _begin(self, kind: str, name: str = "", call_id: str = "") -> bytes:
        item = self._new_item(kind, name, call_id)
        index = len(self._items)
        self._items.append(item)
        self._open, self._texts = kind, []
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        added = self._event("response.output_item.added", output_index=index, item=item)
        if kind == "arguments":
            self._where = orjson.dumps(where)[:-1]
            return added
        where["content_index"] = 0
        added += self._event("response.content_part.added", **where, part=_content(kind, ""))
        self._where = orjson.dumps(where if kind == "reasoning" else {**where, "logprobs": []})[:-1]
        return added

    def _delta(self, text: str) -> bytes:
        name = _DELTAS[self._open]
        self._sequence += 1
        return b"".join(
            (
                *(b"event: ", name, b'.delta\ndata: {"type":"', name, b'.delta","sequence_number":'),
                *(b"%d," % (self._sequence - 1), self._where[1:], b',"delta":', orjson.dumps(text), b"}\n\n"),
            )
        )

    def _close(self, *, complete: bool = True) -> bytes:
        """The events that end the open item, if one is open."""
        if not self._open:
            return b""
        kind, text, index = self._open, "".join(self._texts), len(self._items) - 1
        self._open, self._texts = "", []
        status = "completed" if complete else "incomplete"
        item = self._items[index] = _filled(self._items[index], kind, text, status)
        where = {"item_id": item["id"], "output_index": index}
        name = _DELTAS[kind].decode() + ".done"
        if kind == "arguments":
            events = self._event(name, **where, name=item["name"], arguments=text)
        else:
            where["content_index"] = 0
            more: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
            events = self._event(name, **where, text=text, **more)
            events += self._event("response.content_part.done", **where, part=_content(kind, text))
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _new_item(self, kind: str, name: str = "", call_id: str = "") -> dict[str, Any]:
        """An item of this kind that has just begun."""
        number = f"{self._id}{len(self._items)}"
        match kind:
            case "content":
                item: dict[str, Any] = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": []}
            case "reasoning":
                item = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": []}
            case _:
                ids = {"id": f"fc_{number}", "type": "function_call", "call_id": call_id}
                item = {**ids, "name": name, "arguments": ""}
        return {**item, "status": "in_progress"}

    def _closing_event(self) -> bytes:
        return self._event(f"response.{self._ends['status']}", response=self._ends)

    def _ended(self, usage: Usage) -> None:
        """Makes the complete response, also as JSON."""
        if self._reader is not None:
            usage.reasoning_tokens = self._reader.reasoning_tokens
        response = self._response("incomplete" if self._length else "completed", usage)
        if self._length:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self.output = orjson.dumps(self._items)
        self.rest = orjson.dumps({name: value for name, value in response.items() if name != "output"})
        self._ends = response

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        ends = {"status": status, "error": None, "incomplete_details": None, "output": self._items}
        return {**self._fields, **ends, "usage": None if usage is None else usage_fields(usage)}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        data = {"type": kind, "sequence_number": self._sequence - 1, **fields}
        return sse_event(orjson.dumps(data), kind.encode())


_DELTAS = {
    "content": b"response.output_text",
    "reasoning": b"response.reasoning_text",
    "arguments": b"response.function_call_arguments",
}


def _content(kind: str, text: str) -> dict[str, Any]:
    """The one part of a message's or a reasoning's content."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _filled(item: dict[str, Any], kind: str, text: str, status: str) -> dict[str, Any]:
    value: dict[str, Any] = {"arguments": text} if kind == "arguments" else {"content": [_content(kind, text)]}
    return {**item, **value, "status": status}


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
