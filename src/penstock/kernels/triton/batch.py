"""Builds a step's inputs on the device from the rows of the batch, and updates the rows after the step.

The host sends only which rows compute how many tokens, and nothing while the same rows decode: token ids, positions,
contexts and block tables are on the device. The token ids include tokens that the host has not received yet.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import batch_arrays
from penstock.kernels.batch_arrays import BatchRows, StepArrays

TOKENS = 256  # tokens that a program handles at once

# Lines of `StepArrays.units`, as a kernel may read them.
_FIRST, _LENGTH, _CONTEXT = map(tl.constexpr, (batch_arrays.FIRST, batch_arrays.LENGTH, batch_arrays.CONTEXT))
_BATCH_ROW, _LOGITS, _DRAFTS = map(tl.constexpr, (batch_arrays.BATCH_ROW, batch_arrays.LOGITS, batch_arrays.DRAFTS))


def fill(state: BatchRows, step: StepArrays, count: int, block_size: int) -> None:
    """Fills in the contexts and all tokens' inputs of the step's first `count` sequences."""
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
    """Counts the tokens of the step's first `count` sequences as computed and appends int64 `sampled` [rows of logits].

    A draft is accepted when it and all drafts before it equal the sampled tokens. The sampled token after the accepted
    drafts is appended too. Adds the number of appended tokens to int32 `outputs` [rows of the batch].
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


_COUNTS = ["capacity", "tokens", "rows", "blocks", "step_tokens"]


@triton.jit(do_not_specialize=_COUNTS)
def _fill(
    ids,
    computed,
    tables,
    units,
    token_ids,
    positions,
    blocks_out,
    offsets,
    capacity,
    tokens,
    rows,
    blocks,
    step_tokens,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Each program fills one sequence in one KV group. That of group 0 also writes what all groups share."""
    sequence = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    first = tl.load(units + _FIRST * capacity + sequence)
    count = tl.load(units + _LENGTH * capacity + sequence)
    row = tl.load(units + _BATCH_ROW * capacity + sequence).to(tl.int64)
    real = row >= 0
    before = tl.load(computed + row, mask=real, other=0)
    if group == 0:
        tl.store(units + _CONTEXT * capacity + sequence, tl.where(real, before + count, 0))
    table = tables + (group * rows + row) * blocks
    for start in range(0, count, TOKENS):
        nth = start + tl.arange(0, TOKENS)
        inside = nth < count
        position = before + nth
        block = tl.load(table + position // BLOCK_SIZE, mask=inside & real, other=-1)
        tl.store(blocks_out + group * step_tokens + first + nth, block.to(tl.int64), mask=inside)
        if group == 0:
            token = tl.load(ids + row * tokens + position, mask=inside & real, other=0)
            tl.store(token_ids + first + nth, token.to(tl.int64), mask=inside)
            tl.store(positions + first + nth, position.to(tl.int64), mask=inside)
            tl.store(offsets + first + nth, (position % BLOCK_SIZE).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["capacity", "tokens"])
def _advance(ids, computed, units, sampled, outputs, accepted, capacity, tokens):
    """Each program updates one sequence."""
    sequence = tl.program_id(0)
    row = tl.load(units + _BATCH_ROW * capacity + sequence).to(tl.int64)
    if row >= 0:
        drafts = tl.load(units + _DRAFTS * capacity + sequence)
        known = tl.load(units + _CONTEXT * capacity + sequence) - drafts
        index = tl.load(units + _LOGITS * capacity + sequence)
        appended = 0
        if index >= 0:
            matches = True
            while matches & (appended <= drafts):
                place = ids + row * tokens + known + appended
                token = tl.load(sampled + index + appended).to(tl.int32)
                matches = (appended < drafts) & (tl.load(place) == token)
                tl.store(place, token)
                appended += 1
            tl.store(outputs + row, tl.load(outputs + row) + appended)
            tl.store(accepted + index, appended)
        tl.store(computed + row, known + tl.maximum(appended - 1, 0))
