"""Encodes answers as Ollama does: one JSON object, or in a stream one on each line."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from penstock.frontend.answer import Codec, CollectedChoice
from penstock.frontend.call import ModelContext
from penstock.frontend.errors import APIError
from penstock.frontend.generation import ChoiceUpdate, PromptPart, Usage
from penstock.frontend.ollama.errors import error_body
from penstock.frontend.requests.logprobs import token_logprobs
from penstock.frontend.requests.reply import ReplyBlock, ReplyReader, join_parts, read_parts
from penstock.frontend.requests.tools import parse_arguments
from penstock.text.calls import Part

NDJSON = b"application/x-ndjson"


def now() -> str:
    return datetime.now(UTC).isoformat()


class OllamaCodec(Codec):
    """An answer of chat has a message; one of generate has the text, and the context of a next request."""

    stream_type = NDJSON
    heartbeat = b" "  # before a line's JSON; an empty line would be an error to clients

    def __init__(
        self,
        context: ModelContext,
        model: str,
        part: PromptPart,
        reader: ReplyReader | None,
        *,
        chat: bool,
        thinking: bool = True,
        returns_context: bool = False,
    ) -> None:
        """`model` is its name in the request. `reader` divides the text; without it, all text is content.
        `thinking`: the answer shows reasoning."""
        self._context = context
        self._model = model
        self._reader = reader
        self._chat = chat
        self._thinking = thinking
        self._k = part.request.sampling.logprobs
        self._prompt_ids = part.request.prompt_ids
        self._ids: list[int] | None = [] if returns_context else None
        self._call: ReplyBlock | None = None  # a call whose arguments are not complete
        self._call_numbers = itertools.count()
        self._reason = ""

    def chunk(self, update: ChoiceUpdate, usage: Usage) -> bytes:
        ended = update.finish_reason is not None
        if self._ids is not None:
            self._ids += update.token_ids[: update.tokens - len(self._ids)]
        if ended:
            self._reason = str(update.finish_reason)
        blocks = list(self._blocks(read_parts(self._reader, update, ended=ended), ended))
        logprobs = self._logprobs(update.logprobs)
        if logprobs and not blocks:
            blocks = [ReplyBlock("content", "")]
        lines = []
        for block in blocks:
            lines.append(self._line({**self._content([block]), **logprobs, "done": False}))
            logprobs = {}
        return b"".join(lines)

    def closing(self, usage: Usage) -> bytes:
        return self._line({**self._content([]), **self._end(usage, self._reason, self._ids)})

    def failure(self, error: APIError) -> bytes:
        return error_body(error) + b"\n"

    def whole(self, answers: list[CollectedChoice], usage: Usage) -> bytes:
        (answer,) = answers
        blocks = join_parts(read_parts(self._reader, answer, ended=True))
        ids = None if self._ids is None else answer.ids
        end = self._end(usage, str(answer.finish_reason), ids)
        return self._line({**self._content(blocks), **self._logprobs(answer.logprobs), **end}).rstrip(b"\n")

    def _blocks(self, parts: Iterable[Part], ended: bool) -> Iterator[ReplyBlock]:
        """The parts to show. A call is shown once its arguments are complete."""
        for part in parts:
            if part.kind == "arguments" and self._call is not None:
                self._call.text += part.text
                continue
            yield from self._complete_call()
            if part.kind == "call":
                self._call = ReplyBlock("call", "", part.text, part.id)
            elif part.kind == "content" or self._thinking:
                yield ReplyBlock("content" if part.kind == "content" else "reasoning", part.text)
        if ended:
            yield from self._complete_call()

    def _complete_call(self) -> Iterator[ReplyBlock]:
        if self._call is not None:
            yield self._call
        self._call = None

    def _content(self, blocks: Sequence[ReplyBlock]) -> dict[str, Any]:
        text = "".join(block.text for block in blocks if block.kind == "content")
        thinking = "".join(block.text for block in blocks if block.kind == "reasoning" and self._thinking)
        calls = [self._tool_call(block) for block in blocks if block.kind == "call"]
        fields: dict[str, Any] = {"role": "assistant", "content": text} if self._chat else {"response": text}
        if thinking:
            fields["thinking"] = thinking
        if calls:
            fields["tool_calls"] = calls
        return {"message": fields} if self._chat else fields

    def _tool_call(self, block: ReplyBlock) -> dict[str, Any]:
        function = {"index": next(self._call_numbers), "name": block.name, "arguments": parse_arguments(block.text)}
        return {"id": block.id, "function": function}

    def _logprobs(self, packed: bytes | bytearray) -> dict[str, Any]:
        if self._k is None or not packed:
            return {}
        return {"logprobs": token_logprobs(self._context.model.tokenizer, packed, self._k)}

    def _end(self, usage: Usage, reason: str, ids: list[int] | None) -> dict[str, Any]:
        """The fields of the last object. Durations are in nanoseconds."""
        total = time.monotonic() - self._context.start
        prompt = min(usage.first_token_seconds, total)
        end: dict[str, Any] = {
            "done": True,
            "done_reason": reason,
            "total_duration": int(total * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(prompt * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((total - prompt) * 1e9),
        }
        if ids is not None:
            end["context"] = [*self._prompt_ids, *ids]
        return end

    def _line(self, fields: dict[str, Any]) -> bytes:
        return orjson.dumps({"model": self._model, "created_at": now(), **fields}) + b"\n"
