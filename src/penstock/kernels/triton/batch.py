"""The inputs of a step, built on the device from the rows of the batch, and the rows moved on after it.

The host sends which rows compute how many tokens. Token ids, positions, contexts and block tables are on the device:
while the same rows decode, the host sends nothing. Token ids include those of a step whose result the host has not seen
yet.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.batch_arrays import BatchRows, StepArrays

TOKENS = 256  # tokens that a program writes at once


def fill(state: BatchRows, step: StepArrays, count: int, block_size: int) -> None:
    """Fill in the contexts of the step's first `count` sequences, and all of their tokens."""
    if count:
        groups = len(state.tables)
        _fill[(count, groups)](
            state.token_ids,
            state.computed,
            state.tables,
            step.units,
            step.token_ids,
            step.positions,
            step.blocks,
            step.offsets,
            step.units.shape[1],
            state.token_ids.shape[1],
            state.tables.shape[1],
            state.tables.shape[2],
            step.token_ids.shape[0],
            BLOCK_SIZE=block_size,
            TOKENS=TOKENS,
            num_warps=4,
        )


def advance(state: BatchRows, step: StepArrays, count: int, sampled: Tensor, outputs: Tensor) -> None:
    """Count the tokens of the step's first `count` sequences as computed and append int64 `sampled` [rows of logits].

    Of a sequence's drafts those before the first one that was not sampled are accepted, and the sampled token after
    them follows. int32 `outputs` [rows of the batch] are counted up.
    """
    if count:
        _advance[(count,)](
            state.token_ids,
            state.computed,
            step.units,
            sampled,
            outputs,
            step.accepted,
            step.units.shape[1],
            state.token_ids.shape[1],
            num_warps=1,
        )


_COUNTS = ["capacity", "tokens", "rows", "blocks", "room"]


@triton.jit(do_not_specialize=_COUNTS)
def _fill(
    ids,
    computed,
    tables,
    sequences,
    token_ids,
    positions,
    blocks_out,
    offsets,
    capacity,
    tokens,
    rows,
    blocks,
    room,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One sequence and one KV group to a program; the first group's writes what is the same for all."""
    sequence = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    first = tl.load(sequences + sequence)
    count = tl.load(sequences + capacity + sequence)
    row = tl.load(sequences + 3 * capacity + sequence).to(tl.int64)
    real = row >= 0
    before = tl.load(computed + row, mask=real, other=0)
    if group == 0:
        tl.store(sequences + 2 * capacity + sequence, tl.where(real, before + count, 0))
    table = tables + (group * rows + row) * blocks
    for start in range(0, count, TOKENS):
        nth = start + tl.arange(0, TOKENS)
        inside = nth < count
        position = before + nth
        block = tl.load(table + position // BLOCK_SIZE, mask=inside & real, other=-1)
        tl.store(blocks_out + group * room + first + nth, block.to(tl.int64), mask=inside)
        if group == 0:
            token = tl.load(ids + row * tokens + position, mask=inside & real, other=0)
            tl.store(token_ids + first + nth, token.to(tl.int64), mask=inside)
            tl.store(positions + first + nth, position.to(tl.int64), mask=inside)
            tl.store(offsets + first + nth, (position % BLOCK_SIZE).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["capacity", "tokens"])
def _advance(ids, computed, units, sampled, outputs, accepted, capacity, tokens):
    """One sequence to a program."""
    sequence = tl.program_id(0)
    row = tl.load(units + 3 * capacity + sequence).to(tl.int64)
    if row >= 0:
        drafts = tl.load(units + 6 * capacity + sequence)
        known = tl.load(units + 2 * capacity + sequence) - drafts
        index = tl.load(units + 5 * capacity + sequence)
        gained = 0
        if index >= 0:
            right = True
            while right & (gained <= drafts):
                place = ids + row * tokens + known + gained
                token = tl.load(sampled + index + gained).to(tl.int32)
                right = (gained < drafts) & (tl.load(place) == token)
                tl.store(place, token)
                gained += 1
            tl.store(outputs + row, tl.load(outputs + row) + gained)
            tl.store(accepted + index, gained)
        tl.store(computed + row, known + tl.maximum(gained - 1, 0))
