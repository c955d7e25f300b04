"""The units of work of a step: runs of consecutive tokens, each of one row of the batch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import AttentionBatch
from penstock.messages import Window
from penstock.runtime.batch import ResidentBatch


class Units(NamedTuple):
    """Arrays [units] in the plan's order."""

    rows: NDArray[np.int64]
    start: NDArray[np.int64]  # position of the first token
    length: NDArray[np.int64]  # tokens, at least 1, drafts included
    offset: NDArray[np.int64]  # [units + 1]: of the first token among the step's; then the number of these
    drafts: NDArray[np.int64]  # tokens that are drafts
    logits: NDArray[np.int64]  # rows of logits: those of the last 1 + drafts tokens where it samples, else 0

    @classmethod
    def none(cls) -> "Units":
        """No work."""
        empty = np.zeros(0, np.int64)
        return cls(empty, empty, empty, np.zeros(1, np.int64), empty, empty)

    @property
    def tokens(self) -> int:
        return int(self.offset[-1])

    @property
    def decodes(self) -> bool:
        """Whether there are units, and each computes one token and samples."""
        return self.tokens == len(self.rows) > 0 and self.in_place

    @property
    def logit_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The unit of each row of logits, and how many drafts lie before the row."""
        unit = np.arange(len(self.logits)).repeat(self.logits)
        return unit, np.arange(len(unit)) - self.first_logit_rows[unit]

    @property
    def first_logit_rows(self) -> NDArray[np.int64]:
        """The index of each unit's first row of logits in the step. A unit without logits has the next unit's index."""
        return np.cumsum(self.logits) - self.logits

    @property
    def in_place(self) -> bool:
        """Whether every token has a row of logits."""
        return self.tokens == int(self.logits.sum())


def units_of(
    batch: ResidentBatch, rows: Sequence[int], lengths: Sequence[int], sample: Sequence[bool], drafts: Sequence[int]
) -> Units:
    """The next lengths[i] tokens of rows[i]. RuntimeError where a row has fewer, or would sample before its end."""
    batch.catch_up()
    each, length = np.array(rows, np.int64), np.array(lengths, np.int64)
    sampled, drafted = np.array(sample, np.bool_), np.array(drafts, np.int64)
    offset = np.zeros(len(each) + 1, np.int64)
    np.cumsum(length, out=offset[1:])
    start = batch.num_computed[each]
    left = batch.num_tokens[each] + drafted - start - length
    wrong = (left < 0) | (sampled & (left != 0)) | (length < 1 + drafted)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise RuntimeError(
            f"the plan computes {length[i]} tokens of a sequence and then {'samples' if sample[i] else 'stops'}, but "
            f"{length[i] + left[i]} tokens remain"
        )
    return Units(each, start, length, offset, drafted, np.where(sampled, 1 + drafted, 0))


def attention_batch(group: int, window: Window, batch: ResidentBatch, units: Units) -> AttentionBatch:
    """Returns a step as a KV group sees it, from the host's counts. The arrays are copies, which no later plan
    changes."""
    context = units.start + units.length
    most_blocks = -(-int(context.max()) // batch.block_size)
    tables = batch.tables[group][units.rows, :most_blocks].astype(np.int64)
    return AttentionBatch(batch.block_size, window, units.offset, context, tables)
