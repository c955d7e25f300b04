"""What the sampler keeps of each row: arrays for what every row has, a sparse object for what few have."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.messages import SamplingParams
from penstock.runtime import noise
from penstock.runtime.logit_edits import LogitEdits

GREEDY_BELOW = (
    1e-5  # a lower temperature is greedy: it would divide logits that differ by rounding alone into certainty
)

# How a row's token is chosen. Each kind has its own code, so that a row takes the same way in every batch.
GREEDY, PLAIN, FILTERED, TOP_K = range(4)

NOT_FINITE = "the model's logits are not finite: NaN, +inf, or -inf for every token"
ALL_BANNED = "no token is left to choose: the request's logit_bias, penalties and min_tokens ban every one; relax them"


class Sampled(NamedTuple):
    """What each row of logits gave, in their order."""

    token_ids: list[int]
    logprobs: list[bytes]  # one packed row each; empty where not asked for
    errors: dict[int, str]  # index in the rows sampled -> why it has no token (its token id is 0 and means nothing)


class SamplingBatch:
    """Parameters and counters of up to `max_rows` rows: arrays indexed by row."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self.vocab_size = vocab_size
        self.kind = np.full(max_rows, GREEDY, np.int8)
        self.temperature = np.zeros(max_rows)
        self.top_k = np.zeros(max_rows, np.int64)
        self.top_p = np.ones(max_rows)
        self.min_p = np.zeros(max_rows)
        self.streams = np.zeros(max_rows, np.uint64)
        self.num_outputs = np.zeros(max_rows, np.int64)
        self.logprobs = np.full(max_rows, -1, np.int64)  # how many of the best; -1: no logprobs at all
        self.edits: dict[int, LogitEdits] = {}  # of the rows that have any

    def add(
        self, row: int, params: SamplingParams, choice: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        """Take a row into use. ValueError for a token id that has no logit; the row is then as it was."""
        edits = LogitEdits(params, prompt_ids, output_ids, self.vocab_size)
        self.remove(row)
        if edits.needed:
            self.edits[row] = edits
        self.describe(row, params, choice, len(output_ids))

    def describe(self, row: int, params: SamplingParams, choice: int, outputs: int) -> None:
        """Fill in a row's arrays: all but its edits."""
        top_k = params.top_k if params.top_k < self.vocab_size else 0
        self.kind[row] = _kind(params, top_k)
        self.temperature[row] = params.temperature
        self.top_k[row] = top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.streams[row] = noise.stream(params.seed, choice)
        self.num_outputs[row] = outputs
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def remove(self, row: int) -> None:
        self.edits.pop(row, None)

    def record(self, rows: NDArray[np.int64], sampled: Sampled) -> None:
        """Append its token to each of these distinct rows that has one."""
        self.num_outputs[np.delete(rows, list(sampled.errors)) if sampled.errors else rows] += 1
        if not self.edits:
            return
        for i, row in enumerate(rows.tolist()):
            edits = self.edits.get(row)
            if edits and i not in sampled.errors:
                edits.record(sampled.token_ids[i])
                if not edits.needed:
                    del self.edits[row]


def _kind(params: SamplingParams, top_k: int) -> int:
    if params.temperature < GREEDY_BELOW:
        return GREEDY
    if top_k:
        return TOP_K
    return FILTERED if params.top_p < 1 or params.min_p > 0 else PLAIN
