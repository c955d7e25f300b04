"""The best few of many logits, without sorting the many.

Every function treats each row alone and decides by comparing, never by summing: a row's result cannot depend on the
rest of the batch.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = 0xFFFFFFFF
_SIGN = np.int32(-(2**31))

Logits = NDArray[np.float32]  # [rows, vocab]


class Candidates(NamedTuple):
    """Some tokens of each row. Shorter rows are padded with logit -inf and id NO_TOKEN."""

    values: NDArray[np.float32]  # [rows, width]
    token_ids: NDArray[np.uint32]  # [rows, width]


def count(marks: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many of each row are marked: [rows]. NumPy's count along an axis adds integers, at a tenth of the speed."""
    return np.array([np.count_nonzero(row) for row in marks])


def top_floor(logits: Logits, k: int) -> NDArray[np.float32]:
    """A value that at least k logits of a row reach, and not many more: [rows]. 1 <= k <= vocab.

    The logits are dealt into n >= 4 k piles; the k best of the piles' maxima are k logits, so the least of them is a
    floor of the k best of all. It takes one vectorised maximum where an exact selection takes several passes.
    """
    rows, vocab = logits.shape
    piles = max(256, 4 * k)
    if 2 * piles > vocab:
        return np.partition(logits, vocab - k, axis=1)[:, vocab - k]
    depth = vocab // piles  # the remainder is left out: a floor of fewer logits is a floor still
    best = logits[:, : depth * piles].reshape(rows, depth, piles).max(axis=1)
    return np.partition(best, piles - k, axis=1)[:, piles - k]


def gather(values: Logits, chosen: NDArray[np.bool_], token_ids: NDArray[np.uint32] | None = None) -> Candidates:
    """The chosen columns of each row, in their order. A column is its token in `token_ids`, or its number."""
    rows, width = values.shape
    flat = np.flatnonzero(chosen)
    if rows == 1:
        return Candidates(values[:, flat], (flat.astype(np.uint32) if token_ids is None else token_ids[0, flat])[None])
    counts = count(chosen)
    row = np.repeat(np.arange(rows), counts)
    ids = (flat - row * width).astype(np.uint32) if token_ids is None else token_ids.reshape(-1)[flat]
    slot = np.arange(flat.size) - np.repeat(np.cumsum(counts) - counts, counts)
    found = Candidates(
        np.full((rows, counts.max()), -np.inf, np.float32), np.full((rows, counts.max()), NO_TOKEN, np.uint32)
    )
    found.values[row, slot] = values.reshape(-1)[flat]
    found.token_ids[row, slot] = ids
    return found


def best_first(logits: Logits, k: int) -> Candidates:
    """The k best tokens of each row and perhaps a few more, best first, equals by ascending id. 1 <= k <= vocab."""
    found = gather(logits, logits >= top_floor(logits, k)[:, None])
    # One integer per token sorts by falling logit, then by id. The sign flip makes a float's bits compare as integers;
    # it is its own inverse. Adding 0 gives -0 and 0, which are equal, the same bits.
    bits = (found.values + np.float32(0.0)).view(np.int32)
    falling = ~_flip_negative(bits) ^ _SIGN
    order = falling.view(np.uint32).astype(np.uint64) << np.uint64(32)
    order |= found.token_ids
    order.sort(axis=1)
    falling = (order >> np.uint64(32)).astype(np.uint32).view(np.int32)
    return Candidates(_flip_negative(~(falling ^ _SIGN)).view(np.float32), order.astype(np.uint32))


def _flip_negative(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
