"""Formats packed logprobs as JSON values."""

from typing import Any

import orjson

from penstock.messages import unpack_rows
from penstock.text import Tokenizer

_LOWEST = -9999.0  # stands for minus infinity, which JSON does not have; vLLM sends the same


def finite(logprob: float) -> float:
    """A logprob that JSON can hold. A token that a filter excluded has minus infinity."""
    return logprob if logprob > _LOWEST else _LOWEST


def token_logprobs(tokenizer: Tokenizer, packed: bytes | bytearray, k: int) -> list[orjson.Fragment]:
    """One entry for each token: its text, bytes and logprob, and the same of its `k` most likely alternatives.

    Entries are encoded one by one, as the objects of a whole answer would take ten times its memory.
    """
    return [
        orjson.Fragment(
            orjson.dumps(
                {
                    **_entry(tokenizer, row.token_id, row.logprob),
                    "top_logprobs": [_entry(tokenizer, token_id, logprob) for token_id, logprob in row.top],
                }
            )
        )
        for row in unpack_rows(bytes(packed), k)
    ]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token(token_id), "logprob": finite(logprob), "bytes": list(piece)}
