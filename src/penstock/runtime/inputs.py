"""From the persistent batch to a step's tensors, without a loop over tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels import AttentionBatch
from penstock.models import GroupInput, StepInput
from penstock.runtime.batch import PersistentBatch


class Segments(NamedTuple):
    """The units of work of a step, each a run of consecutive tokens of one row of the batch."""

    rows: NDArray[np.int64]
    start: NDArray[np.int64]  # position of the first token
    length: NDArray[np.int64]  # tokens, at least 1
    offset: NDArray[np.int64]  # of the first token among the step's, and last the number of these: [units + 1]
    sample: NDArray[np.bool_]  # whether a token is to follow

    @classmethod
    def none(cls) -> "Segments":
        """No work."""
        empty = np.zeros(0, np.int64)
        return cls(empty, empty, empty, np.zeros(1, np.int64), np.zeros(0, np.bool_))

    @property
    def tokens(self) -> int:
        return int(self.offset[-1])

    @property
    def decodes(self) -> bool:
        """Whether there are units, and each samples after one token."""
        return self.tokens == len(self.rows) > 0 and bool(self.sample.all())


def segments(batch: PersistentBatch, rows: Sequence[int], lengths: Sequence[int], sample: Sequence[bool]) -> Segments:
    """The next lengths[i] tokens of rows[i]. RuntimeError where a row has fewer, or would sample before its end."""
    each, length = np.array(rows, np.int64), np.array(lengths, np.int64)
    offset = np.zeros(len(each) + 1, np.int64)
    np.cumsum(length, out=offset[1:])
    units = Segments(each, batch.num_computed[each], length, offset, np.array(sample, np.bool_))
    left = batch.num_tokens[each] - units.start - length
    wrong = (left < 0) | (units.sample & (left != 0)) | (length < 1)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise RuntimeError(
            f"the plan computes {length[i]} tokens of a sequence and then {'samples' if sample[i] else 'stops'}, but "
            f"{length[i] + left[i]} tokens remain"
        )
    return units


def seen_by(group: int, window: int, batch: PersistentBatch, units: Segments) -> AttentionBatch:
    """A step as a KV group sees it, by what the host knows: copies, which a later plan does not change."""
    context = units.start + units.length
    most_blocks = -(-int(context.max()) // batch.block_size)
    tables = batch.tables[group][units.rows, :most_blocks]
    return AttentionBatch(batch.block_size, window, units.offset, context, tables)


class StepInputs:
    """A step's tensors, in memory with room for the largest step: a recorded step finds them at one place."""

    def __init__(
        self, batch: PersistentBatch, windows: Sequence[int], tokens: int, hidden: Tensor | None = None
    ) -> None:
        """For steps of at most `tokens` tokens. `windows` are those of the KV groups. `hidden` [tokens, hidden size] is
        where what the stage before gives is put, if there is one."""
        self.hidden = hidden
        self._batch = batch
        self._windows = tuple(windows)
        # Token ids and positions, then each group's blocks and offsets.
        self._arrays = [np.zeros(tokens, np.int64) for _ in range(2 + 2 * len(windows))]
        self.tensors = tuple(map(torch.from_numpy, self._arrays))
        self._filled = self.tensors  # as far as the last step filled them

    def step(self, tensors: Sequence[Tensor], attention: Sequence[Any]) -> StepInput:
        """What the model takes: `tensors` in our order, and what was prepared for each group's attention."""
        pairs = zip(attention, tensors[2::2], tensors[3::2], strict=True)
        hidden = None if self.hidden is None else self.hidden[: len(tensors[0])]
        return StepInput(tensors[0], tensors[1], tuple(GroupInput(*each) for each in pairs), hidden)

    def fill(self, units: Segments, prepare: Callable[[int, AttentionBatch], Any]) -> StepInput:
        """What the model needs to compute `units`, until the next call. Calls `prepare` for each KV group."""
        batch, size, count = self._batch, self._batch.block_size, units.tokens
        token_ids, positions, *slots = (array[:count] for array in self._arrays)
        if count == len(units.rows):  # one token each
            rows = units.rows
            positions[:] = units.start
        else:
            rows = units.rows.repeat(units.length)
            np.add(np.arange(count), (units.start - units.offset[:-1]).repeat(units.length), out=positions)
        token_ids[:] = batch.token_ids[rows, positions]
        block_index = positions // size
        attention = []
        for group, window in enumerate(self._windows):
            table = batch.tables[group]
            slots[2 * group][:] = table[rows, block_index]
            np.subtract(positions, block_index * size, out=slots[2 * group + 1])
            attention.append(prepare(group, seen_by(group, window, batch, units)))
        if len(self._filled[0]) != count:
            self._filled = tuple(tensor[:count] for tensor in self.tensors)
        return self.step(self._filled, attention)
