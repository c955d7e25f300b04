"""Logprobs as packed bytes: small on the wire and cheap to concatenate.

A row is little-endian: the token id (i32), its logprob (f32), its rank from 1 (i32), then k pairs of id (i32), logprob
(f32), best first. All rows of one choice have the same k.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def row_size(k: int) -> int:
    """Bytes of one packed row with k alternatives."""
    return 12 + 8 * k


def pack_row(row: TokenLogprobs) -> bytes:
    pairs = [value for pair in row.top for value in pair]
    return struct.pack("<ifi" + "if" * len(row.top), row.token_id, row.logprob, row.rank, *pairs)


def unpack_rows(data: bytes, k: int) -> Iterator[TokenLogprobs]:
    """Rows of `data`, each with k alternatives. Raises ValueError when the length is not a whole number of rows."""
    if len(data) % row_size(k):
        raise ValueError(f"{len(data)} bytes of logprobs are not rows of {row_size(k)} bytes (k={k})")
    for fields in struct.iter_unpack("<ifi" + "if" * k, data):
        token_id, logprob, rank, *pairs = fields
        yield TokenLogprobs(token_id, logprob, rank, tuple(zip(pairs[::2], pairs[1::2], strict=True)))
