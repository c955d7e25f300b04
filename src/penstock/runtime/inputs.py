"""From the persistent batch to a step's tensors, without a loop over tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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


def step_input(
    batch: PersistentBatch, windows: Sequence[int], units: Segments, prepare: Callable[[int, AttentionBatch], Any]
) -> StepInput:
    """What the model needs to compute `units`. `windows` are those of the KV groups, which `prepare` is called for."""
    if units.offset[-1] == len(units.rows):  # one token each
        rows, positions = units.rows, units.start
    else:
        rows = units.rows.repeat(units.length)
        positions = np.arange(units.offset[-1]) + (units.start - units.offset[:-1]).repeat(units.length)
    size = batch.block_size
    block_index = positions // size
    offsets = torch.from_numpy(positions % size)
    context = units.start + units.length
    most_blocks = -(-int(context.max()) // size)
    groups = []
    for group, window in enumerate(windows):
        table = batch.tables[group]
        seen = AttentionBatch(size, window, units.offset, context, table[units.rows, :most_blocks])
        groups.append(GroupInput(prepare(group, seen), torch.from_numpy(table[rows, block_index]), offsets))
    token_ids = torch.from_numpy(batch.token_ids[rows, positions])
    return StepInput(token_ids, torch.from_numpy(positions), tuple(groups))
