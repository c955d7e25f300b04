"""A step's inputs, built on the device from what is known there of every row of the batch.

The host says which rows compute how many tokens. Token ids, among them those sampled by a step whose results the host
has not seen yet, positions, contexts and block tables are on the device already: while the same rows decode, the host
sends nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.triton.attention import describe

TOKENS = 256  # that a program writes at once


@dataclass(frozen=True)
class ResidentRows:
    """What the device knows of each row of the batch. All int32."""

    token_ids: Tensor  # [rows, most tokens + 1]
    computed: Tensor  # [rows]: tokens whose keys and values are stored
    tables: Tensor  # [KV groups, rows, blocks]

    @classmethod
    def empty(cls, rows: int, tokens: int, groups: int, blocks: int, device: torch.device) -> "ResidentRows":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(zeros(rows, tokens + 1), zeros(rows), zeros(groups, rows, blocks))


@dataclass(frozen=True)
class StepArrays:
    """What a step's kernels read, with room for the largest step: a captured graph finds it at one place."""

    sequences: Tensor  # int32 [6, sequences]: as Prepared.sequences has them, and where in the sampled ids theirs is
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    blocks: Tensor  # int64 [KV groups, tokens]: where keys and values go; -1: nowhere
    offsets: Tensor  # int64 [tokens]

    @classmethod
    def empty(cls, sequences: int, tokens: int, groups: int, device: torch.device) -> "StepArrays":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        units = torch.zeros(6, sequences, dtype=torch.int32, device=device)
        return cls(units, zeros(tokens), zeros(tokens), zeros(groups, tokens), zeros(tokens))


def describe_units(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], sample: NDArray[np.bool_], padding: int = 0
) -> tuple[NDArray[np.int32], int]:
    """(what `StepArrays.sequences` begins with, how many of them have one query) for units of work in a step's order:
    the next lengths[i] tokens of rows[i]. The contexts are left to the device.

    `padding` adds so many sequences of one query that are none, behind those of one query; all others must be such.
    """
    first = np.cumsum(lengths) - lengths
    sampled = np.where(sample, np.cumsum(sample) - 1, -1)
    order = np.argsort(lengths != 1, kind="stable")
    units, decodes = describe(lengths, first, np.zeros_like(rows), rows)
    units = np.concatenate([units, sampled[order].astype(np.int32)[None]])
    if not padding:
        return units, decodes
    if decodes != len(rows):
        raise ValueError(f"a step of {len(rows) - decodes} prompts cannot be padded: only steps that all decode can")
    filled = np.array([0, 1, 0, -1, 0, -1], np.int32)[:, None].repeat(padding, 1)
    filled[0] = len(rows) + np.arange(padding)
    return np.concatenate([units, filled], 1), decodes + padding


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
