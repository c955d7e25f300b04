"""Encodes answers in the format of text-generation-inference (TGI), as a stream of events or as one JSON value."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from penstock.frontend.answer import Codec, CollectedChoice
from penstock.frontend.call import ModelContext
from penstock.frontend.errors import APIError
from penstock.frontend.generation import ChoiceUpdate, PromptPart, Usage
from penstock.frontend.http.sse import sse_event
from penstock.frontend.requests.logprobs import finite
from penstock.frontend.tgi.errors import error_body
from penstock.messages import TokenLogprobs, unpack_rows


class GenerateCodec(Codec):
    """The Codec of one TGI request.

    A stream has one event for each token. The last event also has the whole text and the details. The texts of all
    tokens, joined, are the whole text. A provider sends no tokens, so each piece of its text is one without an id.
    """

    def __init__(
        self, context: ModelContext, part: PromptPart, *, details: bool, top: bool, echo: str, in_list: bool
    ) -> None:
        """`details`: an answer that is not streamed has details. `top`: each token has its most likely alternatives.

        `echo` is put before the generated text. `in_list`: an answer that is not streamed is put into a list of one.
        """
        self._tokenizer = context.model.tokenizer
        self._request = part.request
        self._k = part.request.sampling.logprobs or 0
        self._details = details
        self._top = top
        self._echo = echo
        self._in_list = in_list
        self._text = io.StringIO()
        self._length = 0  # characters of the generated text so far
        self._index = 0

    def chunk(self, update: ChoiceUpdate, usage: Usage) -> bytes:
        events: list[dict[str, Any]] = []
        if self._request.sampling.logprobs is None and (update.text or update.finish_reason is not None):
            self._index += 1
            events.append({"index": self._index, "token": _piece(update.text), "generated_text": None, "details": None})
        for row, text in self._tokens(update.logprobs, update.offsets, update.text, self._length):
            self._index += 1
            event: dict[str, Any] = {"index": self._index, "token": self._token(row.token_id, row.logprob, text)}
            if self._top:
                event["top_tokens"] = self._alternatives(row)
            event |= {"generated_text": None, "details": None}
            events.append(event)
        self._text.write(update.text)
        self._length += len(update.text)
        if update.finish_reason is not None and events:
            events[-1]["generated_text"] = self._echo + self._text.getvalue()
            events[-1]["details"] = {**self._end(update), "input_length": usage.prompt_tokens}
        return b"".join(sse_event(orjson.dumps(event)) for event in events)

    def failure(self, error: APIError) -> bytes:
        return sse_event(error_body(error))

    def whole(self, answers: list[CollectedChoice], usage: Usage) -> bytes:
        (answer,) = answers
        fields: dict[str, Any] = {"generated_text": self._echo + answer.text}
        if self._details:
            rows = list(self._tokens(answer.logprobs, answer.offsets, answer.text, 0))
            fields["details"] = details = self._end(answer)
            details["prefill"] = self._prefill(answer.prompt_logprobs)
            details["tokens"] = [self._token(row.token_id, row.logprob, text) for row, text in rows]
            if self._top:
                details["top_tokens"] = [self._alternatives(row) for row, _ in rows]
        return orjson.dumps([fields] if self._in_list else fields)

    def _tokens(
        self, packed: bytes | bytearray, offsets: Sequence[int], text: str, began: int
    ) -> Iterator[tuple[TokenLogprobs, str]]:
        """Yields each token with its part of `text`, which begins at character `began` of the whole answer.

        The detokeniser may hold text back, for example until a stop string is complete or ruled out. A token whose text
        is held back gets "". The text goes to the first token of the update in which it arrives.
        """
        rows = unpack_rows(bytes(packed), self._k)
        ends = [*offsets[1:], began + len(text)] if offsets else []
        start = began
        for row, end in zip(rows, ends, strict=True):
            end = min(max(end, start), began + len(text))
            yield row, text[start - began : end - began]
            start = end

    def _token(self, token_id: int, logprob: float, text: str) -> dict[str, Any]:
        special = token_id in self._tokenizer.special_ids
        return {"id": token_id, "text": text, "logprob": finite(logprob), "special": special}

    def _alternatives(self, row: TokenLogprobs) -> list[dict[str, Any]]:
        return [self._token(token_id, logprob, self._tokenizer.token(token_id)) for token_id, logprob in row.top]

    def _prefill(self, packed: bytes) -> list[dict[str, Any]]:
        """Returns the tokens of the prompt, or [] if they were not requested. The first one has no logprob (None)."""
        if self._request.sampling.prompt_logprobs is None:
            return []
        logprobs = [None, *(finite(row.logprob) for row in unpack_rows(packed, 0))]
        return [
            {"id": token_id, "text": self._tokenizer.token(token_id), "logprob": logprob}
            for token_id, logprob in zip(self._request.prompt_ids, logprobs, strict=True)
        ]

    def _end(self, source: ChoiceUpdate | CollectedChoice) -> dict[str, Any]:
        reason = "length"
        if source.finish_reason != "length":
            reason = "eos_token" if source.stopped is None else "stop_sequence"
        return {"finish_reason": reason, "generated_tokens": source.tokens, "seed": self._request.sampling.seed}


def _piece(text: str) -> dict[str, Any]:
    """A piece of a provider's text in the place of a token. The last one is empty, like an end of sequence."""
    return {"id": -1, "text": text, "logprob": None, "special": not text}
