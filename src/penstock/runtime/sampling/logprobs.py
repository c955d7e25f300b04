"""Logprobs of given tokens and of the best beside them, packed as `penstock.messages.logprobs` lays them out.

They are those of the model itself: the log-softmax of the raw logits, before biases, penalties, temperature and filters
(what vLLM calls raw logprobs). So a token's logprob does not depend on how it was chosen, and scoring a prompt with
`prompt_logprobs` agrees with generating it.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.messages import row_size

Logits = NDArray[np.float32]  # [rows, vocab]


def pack_logprobs(logits: Logits, tokens: NDArray[np.int64], k: int) -> NDArray[np.int32]:
    """Packed logprobs of `tokens` [rows] with the k best tokens beside each: int32 [rows, words].

    The token's rank is 1 + the number of strictly greater logits. Equal logits are listed by ascending id. ValueError
    where k exceeds the vocabulary.
    """
    if k > logits.shape[1]:
        raise ValueError(f"{k} logprobs of a vocabulary of {logits.shape[1]}: ask for {logits.shape[1]} at most")
    words = np.empty((len(logits), row_size(k) // 4), np.int32)
    reals = words.view(np.float32)
    chosen = np.take_along_axis(logits, tokens[:, None], 1)
    normaliser = _log_sum_exp(logits)
    words[:, 0] = tokens
    reals[:, 1] = chosen[:, 0] - normaliser
    words[:, 2] = 1 + np.count_nonzero(logits > chosen, axis=1)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    words[:, 3::2] = best
    reals[:, 4::2] = np.take_along_axis(logits, best, 1) - normaliser[:, None]
    return words


def _log_sum_exp(logits: Logits) -> NDArray[np.float64]:
    """log of the sum of exp(logits) over each row: [rows]."""
    top = logits.max(axis=1)
    # NumPy adds each contiguous row pairwise and alone, so the sum is the same in any batch.
    total = np.exp(logits - top[:, None]).sum(axis=1)
    normaliser: NDArray[np.float64] = top.astype(np.float64) + np.log(total.astype(np.float64))
    return normaliser
