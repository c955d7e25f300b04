"""Formats logprobs as completions have them, and as vLLM's prompt_logprobs."""

from collections.abc import Sequence
from typing import Any

import orjson

from penstock.frontend.requests.logprobs import finite
from penstock.messages import TokenLogprobs, unpack_rows
from penstock.text import Tokenizer


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, which are parallel lists."""

    def __init__(self, tokenizer: Tokenizer, k: int) -> None:
        self._tokenizer = tokenizer
        self._k = k
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[orjson.Fragment | None] = []  # encoded, as objects would take ten times the memory
        self.text_offset: list[int] = []

    def add_prompt(self, prompt_ids: Sequence[int], packed: bytes, offsets: Sequence[int]) -> None:
        """Adds the prompt's tokens. The first one has no logprob."""
        self.tokens.append(self._tokenizer.token(prompt_ids[0]))
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.text_offset.append(offsets[0])
        self.add(packed, offsets[1:], 0)

    def add(self, packed: bytes | bytearray, offsets: Sequence[int], base: int) -> None:
        """Adds output tokens. Their offsets count from `base`."""
        for row, offset in zip(unpack_rows(bytes(packed), self._k), offsets, strict=True):
            token = self._tokenizer.token(row.token_id)
            self.tokens.append(token)
            self.token_logprobs.append(finite(row.logprob))
            self.top_logprobs.append(self._top(row, token))
            self.text_offset.append(base + offset)

    def extend(self, other: "CompletionLogprobs") -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def fields(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def _top(self, row: TokenLogprobs, token: str) -> orjson.Fragment:
        """The k most likely tokens, best first, and the token itself if it is not one of them."""
        top: dict[str, float] = {}
        for token_id, logprob in row.top:
            top.setdefault(self._tokenizer.token(token_id), finite(logprob))
        top.setdefault(token, finite(row.logprob))
        return orjson.Fragment(orjson.dumps(top))


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], packed: bytes, k: int
) -> list[orjson.Fragment | None]:
    """vLLM's `prompt_logprobs`: null for the first token; for each other, itself and the k most likely by token id."""
    rows: list[orjson.Fragment | None] = [None] if prompt_ids else []
    for row in unpack_rows(packed, k):
        entry = {str(row.token_id): _ranked(tokenizer, row.token_id, row.logprob, row.rank)}
        for rank, (token_id, logprob) in enumerate(row.top, 1):
            entry.setdefault(str(token_id), _ranked(tokenizer, token_id, logprob, rank))
        rows.append(orjson.Fragment(orjson.dumps(entry)))
    return rows


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token(token_id)}
