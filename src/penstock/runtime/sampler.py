"""The sampler: logits to tokens, for a whole batch at once, each row as if it were alone.

The order of processing is

    raw logits -> logit_bias -> repetition, then presence and frequency penalties -> min_tokens
               -> temperature -> top_k -> top_p -> min_p -> argmax of log p + noise

as in transformers, whose filters also see what the earlier ones left: top_p takes its share of the top_k tokens' mass.
(vLLM applies min_p before top_k and top_p. It compares with the most likely token, which every filter keeps, so the
order changes only what top_p takes its share of.) Logprobs are of the raw logits. Equal logits count as ranked by
ascending id everywhere: top_k keeps exactly k tokens, and a greedy row takes the lowest id.

It works in NumPy: in one thread, where torch would wake its pool for every small operation, and with sums whose order
depends on a row's length alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.messages import SamplingParams
from penstock.runtime import noise
from penstock.runtime.logprobs import pack_logprobs
from penstock.runtime.sampling_batch import FILTERED, GREEDY, PLAIN, TOP_K, SamplingBatch
from penstock.runtime.selection import Logits
from penstock.runtime.token_drawer import Draws, TokenDrawer

_NOT_FINITE = "the model's logits are not finite: NaN, +inf, or -inf for every token"
_ALL_MASKED = "no token is left to choose: the request's logit_bias, penalties and min_tokens ban every one; relax them"


class Sampled(NamedTuple):
    """What each row of logits gave, in their order."""

    token_ids: list[int]
    logprobs: list[bytes]  # one packed row each; empty where not asked for
    errors: dict[int, str]  # index in the rows sampled -> why it has no token (its token id is 0 and means nothing)


class Sampler:
    """Chooses the next token of each row, and remembers it as an output of that row."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._batch = SamplingBatch(vocab_size, max_rows)
        self._drawer = TokenDrawer(vocab_size)

    def add(
        self, row: int, params: SamplingParams, choice: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Start row `row` after `output_ids`, as if the sampler had chosen them. What the row was before is forgotten.

        The parameters' ranges have been checked (`messages.check_sampling`). Raises ValueError for a biased or
        penalised token id that has no logit.
        """
        self._batch.add(row, params, choice, prompt_ids, output_ids)

    def remove(self, row: int) -> None:
        self._batch.remove(row)

    def sample(self, logits: torch.Tensor, rows: Sequence[int]) -> Sampled:
        """The next token of each of `rows`, which are distinct. `logits`: float32 [rows, vocab], overwritten."""
        batch = self._batch
        values = np.ascontiguousarray(logits.numpy())
        row_ids = np.asarray(rows, np.int64)
        wanted = batch.logprobs[row_ids]
        with_logprobs = wanted >= 0
        raw = values.copy() if batch.edits and with_logprobs.any() else values  # edits overwrite; drawing does not
        tokens, top = _argmax(values)
        errors = {int(i): _NOT_FINITE for i in np.flatnonzero(~np.isfinite(top))}
        if batch.edits:
            self._edit(values, rows, tokens, errors)
        usable = np.ones(len(row_ids), np.bool_)
        usable[list(errors)] = False
        if batch.kind[row_ids].any():
            self._draw(values, row_ids, usable, tokens)
        tokens[~usable] = 0
        batch.record(row_ids[usable], tokens[usable])
        logprobs = [b""] * len(row_ids)
        index = np.flatnonzero(with_logprobs & usable)
        for i, packed in zip(index, pack_logprobs(raw, index, tokens[index], wanted[index]), strict=True):
            logprobs[i] = packed
        return Sampled(tokens.tolist(), logprobs, errors)

    def _edit(self, logits: Logits, rows: Sequence[int], best: NDArray[np.int64], errors: dict[int, str]) -> None:
        """Apply the edits of the rows that have any, and bring `best` and `errors` up to date."""
        for i, row in enumerate(rows):
            edits = self._batch.edits.get(row)
            if edits and i not in errors:
                edits.apply(logits[i])
                best[i] = logits[i].argmax()
                if not np.isfinite(logits[i, best[i]]):
                    errors[i] = _ALL_MASKED

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
