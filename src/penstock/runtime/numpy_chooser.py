"""Choosing tokens in NumPy: the native chooser's reference, and its stand-in where there are no native kernels.

In one thread, where torch would wake its pool for every small operation, and with sums whose order depends on a row's
length alone.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.runtime import noise
from penstock.runtime.logprobs import pack_logprobs
from penstock.runtime.sampling_batch import (
    ALL_BANNED,
    FILTERED,
    GREEDY,
    NOT_FINITE,
    PLAIN,
    TOP_K,
    Sampled,
    SamplingBatch,
)
from penstock.runtime.selection import Logits
from penstock.runtime.token_drawer import Draws, TokenDrawer


class NumPyChooser:
    """Chooses the next token of rows of a batch."""

    def __init__(self, batch: SamplingBatch) -> None:
        self._batch = batch
        self._drawer = TokenDrawer(batch.vocab_size)

    def __call__(self, logits: Tensor, rows: NDArray[np.int64]) -> Sampled:
        """`logits`: float32 [rows, vocab], overwritten."""
        batch = self._batch
        values = np.ascontiguousarray(logits.numpy())
        wanted = batch.logprobs[rows]
        with_logprobs = wanted >= 0
        raw = values.copy() if batch.edits and with_logprobs.any() else values  # edits overwrite; drawing does not
        tokens, top = _argmax(values)
        errors = {int(i): NOT_FINITE for i in np.flatnonzero(~np.isfinite(top))}
        if batch.edits:
            self._edit(values, rows.tolist(), tokens, errors)
        usable = np.ones(len(rows), np.bool_)
        usable[list(errors)] = False
        if batch.kind[rows].any():
            self._draw(values, rows, usable, tokens)
        tokens[~usable] = 0
        logprobs = [b""] * len(rows)
        index = np.flatnonzero(with_logprobs & usable)
        for i, packed in zip(index, pack_logprobs(raw, index, tokens[index], wanted[index]), strict=True):
            logprobs[i] = packed
        return Sampled(tokens.tolist(), logprobs, errors)

    def _edit(self, logits: Logits, rows: list[int], best: NDArray[np.int64], errors: dict[int, str]) -> None:
        """Apply the edits of the rows that have any, and bring `best` and `errors` up to date."""
        for i, row in enumerate(rows):
            edits = self._batch.edits.get(row)
            if edits and i not in errors:
                edits.apply(logits[i])
                best[i] = logits[i].argmax()
                if not np.isfinite(logits[i, best[i]]):
                    errors[i] = ALL_BANNED

    def _draw(
        self, logits: Logits, rows: NDArray[np.int64], usable: NDArray[np.bool_], tokens: NDArray[np.int64]
    ) -> None:
        """Replace the best token by a drawn one in the rows that are not greedy."""
        batch = self._batch
        kinds = np.where(usable, batch.kind[rows], GREEDY)
        for kind in (PLAIN, FILTERED, TOP_K):
            index = np.flatnonzero(kinds == kind)
            if not index.size:
                continue
            of_kind = rows[index]
            draws = Draws(
                batch.temperature[of_kind],
                batch.top_k[of_kind],
                batch.top_p[of_kind],
                batch.min_p[of_kind],
                noise.keys(batch.streams[of_kind], batch.num_outputs[of_kind]),
            )
            if kind == TOP_K:
                tokens[index] = self._drawer.draw_top_k(logits, index, draws)
            else:
                tokens[index] = self._drawer.draw(logits, index, tokens[index], draws)


def _argmax(logits: Logits) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Each row's best token, the lowest of equals, and its logit. A NaN counts as the best, so it shows there."""
    best = logits.argmax(axis=1)
    return best, logits[np.arange(len(best)), best]
