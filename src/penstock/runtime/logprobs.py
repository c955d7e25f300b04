"""Logprobs of given tokens and of the best beside them, packed as `penstock.messages.logprobs` lays them out.

They are those of the model itself: the log-softmax of the raw logits, before biases, penalties, temperature and filters
(what vLLM calls raw logprobs). So a token's logprob does not depend on how it was chosen, and scoring a prompt with
`prompt_logprobs` agrees with generating it.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.messages import row_size
from penstock.runtime.selection import Logits, best_first, count

BLOCK_LOGITS = 1 << 17  # logits per pass, so that a pass stays in a core's cache


def prompt_logprob_rows(logits: torch.Tensor, targets: torch.Tensor, k: int) -> bytes:
    """One packed row per target, with k alternatives each. logits float32 [m, vocab], targets int64 [m].

    Raises ValueError where k exceeds the vocabulary.
    """
    rows = np.arange(len(targets))
    return b"".join(pack_logprobs(logits.numpy(), rows, targets.numpy(), np.full(len(targets), k)))


def pack_logprobs(
    logits: Logits, rows: NDArray[np.int64], tokens: NDArray[np.int64], wanted: NDArray[np.int64]
) -> list[bytes]:
    """One packed row for each of the logits' `rows`: its token, and as many of the best as `wanted` says.

    The token's rank is 1 + the number of strictly greater logits. Equal logits are listed by ascending id.
    """
    vocab = logits.shape[1]
    if rows.size and wanted.max() > vocab:
        raise ValueError(f"{wanted.max()} logprobs of a vocabulary of {vocab}: ask for {vocab} at most")
    block = max(1, BLOCK_LOGITS // vocab)
    packed: list[bytes] = []
    for first in range(0, len(rows), block):
        part = slice(first, first + block)
        packed += _pack_block(logits[rows[part]], tokens[part], wanted[part])
    return packed


def _pack_block(logits: Logits, tokens: NDArray[np.int64], wanted: NDArray[np.int64]) -> list[bytes]:
    k = int(wanted.max())
    each = np.arange(len(logits))
    chosen = logits[each, tokens]
    normaliser = log_sum_exp(logits)
    words = np.empty((len(logits), row_size(k) // 4), "<i4")
    reals = words.view("<f4")
    words[:, 0] = tokens
    reals[:, 1] = chosen - normaliser
    words[:, 2] = 1 + count(logits > chosen[:, None])
    if k:
        best = best_first(logits, k)
        words[:, 3::2] = best.token_ids[:, :k]
        reals[:, 4::2] = best.values[:, :k] - normaliser[:, None]
    return [row[: row_size(k) // 4].tobytes() for row, k in zip(words, wanted.tolist(), strict=True)]


def log_sum_exp(logits: Logits) -> NDArray[np.float64]:
    """log of the sum of exp(logits) over each row: [rows]."""
    top = logits.max(axis=1)
    shifted = logits - top[:, None]
    # NumPy adds each contiguous row pairwise and alone, so the sum is the same in any batch.
    total: NDArray[np.float32] = np.exp(shifted, out=shifted).sum(axis=1)
    normaliser: NDArray[np.float64] = top.astype(np.float64) + np.log(total.astype(np.float64))
    return normaliser
