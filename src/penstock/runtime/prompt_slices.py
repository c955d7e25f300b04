"""Which prompt tokens a step scores."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.runtime.batch import ResidentBatch
from penstock.runtime.units import Units

PROMPT_LOGPROB_ROWS = 128  # logits of a long prompt are computed in slices, never whole


class PromptSlice(NamedTuple):
    """Tokens of a prompt whose logits are computed at once: each scores the token after it."""

    row: int
    k: int  # alternatives beside each
    first: int  # position of the first token
    length: int
    offset: int  # of the first token among the step's


def prompt_slices(batch: ResidentBatch, units: Units) -> Iterator[PromptSlice]:
    """Yields slices of the rows with prompt logprobs, for the prompt tokens that follow tokens of `units`."""
    if not batch.prompt_logprobs:
        return
    for row, first, length, offset in zip(*(a.tolist() for a in units[:4]), strict=False):
        k = batch.prompt_logprobs.get(row)
        if k is None:
            continue
        end = min(first + length, int(batch.num_prompt[row]) - 1)
        for start in range(first, end, PROMPT_LOGPROB_ROWS):
            yield PromptSlice(row, k, start, min(PROMPT_LOGPROB_ROWS, end - start), offset + start - first)
