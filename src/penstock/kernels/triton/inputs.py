"""A step's inputs, built on the device from what is known there of every row of the batch.

The host says which rows compute how many tokens. Token ids, among them those sampled by a step whose results the host
has not seen yet, positions, contexts and block tables are on the device already: while the same rows decode, the host
sends nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.resident import ResidentRows, StepArrays

TOKENS = 256  # that a program writes at once


def fill(state: ResidentRows, step: StepArrays, count: int, block_size: int) -> None:
    """Fill in the contexts of the step's first `count` sequences, and all of their tokens."""
    if count:
        groups = len(state.tables)
        _fill[(count, groups)](
            state.token_ids,
            state.computed,
            state.tables,
            step.sequences,
            step.token_ids,
            step.positions,
            step.blocks,
            step.offsets,
            step.sequences.shape[1],
            state.token_ids.shape[1],
            state.tables.shape[1],
            state.tables.shape[2],
            step.token_ids.shape[0],
            BLOCK_SIZE=block_size,
            TOKENS=TOKENS,
            num_warps=4,
        )


def advance(state: ResidentRows, step: StepArrays, count: int, sampled: Tensor) -> None:
    """After a step: its sequences' tokens are computed, and int64 `sampled` ids follow those that sampled."""
    if count:
        _advance[(count,)](
            state.token_ids,
            state.computed,
            step.sequences,
            sampled,
            step.sequences.shape[1],
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
def _advance(ids, computed, sequences, sampled, capacity, tokens):
    sequence = tl.program_id(0)
    row = tl.load(sequences + 3 * capacity + sequence).to(tl.int64)
    if row >= 0:
        context = tl.load(sequences + 2 * capacity + sequence)
        tl.store(computed + row, context)
        index = tl.load(sequences + 5 * capacity + sequence)
        if index >= 0:
            tl.store(ids + row * tokens + context, tl.load(sampled + index).to(tl.int32))
