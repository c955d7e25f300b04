"""A batch that lives on the device: what is there of every row, and what a step's kernels read of it.

The kernels that work on it are in kernels/triton/; nothing here needs Triton.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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


@dataclass(frozen=True)
class Prepared:
    """A step's work for one KV group, on the device.

    `sequences` is int32 [at least 5, at least so many as there are]: first token among the step's, count of queries,
    context (queries included), row of the tables, and for those of several queries how many queries the ones of several
    before them have. Sequences of one query come first. A context of 0 is padding: its query's result is 0.
    """

    window: int
    sequences: Tensor
    tables: Tensor  # int32 [rows, blocks]
    decodes: int  # sequences of one query
    prompts: int  # sequences of several
    prompt_queries: int  # of all of these
    longest: int  # of them, a bound of any one's queries


@dataclass(frozen=True)
class Parameters:
    """What the device knows of how each row of the batch is sampled: arrays [rows]."""

    kind: Tensor  # int32: GREEDY, PLAIN, FILTERED or TOP_K, as in runtime/sampling_batch.py
    temperature: Tensor  # fp64, as are the next two
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor  # int32; 0: off
    streams: Tensor  # int64: the bits of noise.stream
    outputs: Tensor  # int32: how many tokens the choice has; counted up by sampling

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> "Parameters":
        dtypes = (torch.int32, *[torch.float64] * 3, torch.int32, torch.int64, torch.int32)
        return cls(*(torch.zeros(rows, dtype=dtype, device=device) for dtype in dtypes))


@dataclass(frozen=True)
class EditParameters:
    """What the device knows of each row's edits: arrays [rows], or [rows, most]."""

    repetition: Tensor  # fp32; 1: none
    presence: Tensor  # fp32
    frequency: Tensor  # fp32
    bias_count: Tensor  # int32
    bias_ids: Tensor  # int32, distinct
    biases: Tensor  # fp32
    ban_count: Tensor  # int32
    ban_ids: Tensor  # int32
    min_tokens: Tensor  # int32: while there are fewer outputs, the ban holds

    @classmethod
    def empty(cls, rows: int, most_biases: int, most_bans: int, device: torch.device | str) -> "EditParameters":
        def zeros(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(rows, *width, dtype=dtype, device=device)

        i32, f32 = torch.int32, torch.float32
        return cls(
            zeros(f32) + 1,
            zeros(f32),
            zeros(f32),
            zeros(i32),
            zeros(i32, most_biases),
            zeros(f32, most_biases),
            zeros(i32),
            zeros(i32, most_bans),
            zeros(i32),
        )


CHOSEN, NOT_FINITE = range(2)  # a row's status


class Chosen(NamedTuple):
    tokens: Tensor  # int64 [n]; 0 where the status is not CHOSEN
    status: Tensor  # int32 [n]: NOT_FINITE where a logit is NaN or +inf, or all are -inf


def describe(
    lengths: NDArray[np.int64],
    first: NDArray[np.int64],
    context: NDArray[np.int64],
    rows: NDArray[np.int64],
    *more: NDArray[np.int64],
) -> tuple[NDArray[np.int32], int]:
    """(`Prepared.sequences` and `more` lines behind it, how many have one query) of sequences in any order: arrays
    [sequences]."""
    order = np.argsort(lengths != 1, kind="stable")
    decodes = int((lengths == 1).sum())
    several = np.where(lengths == 1, 0, lengths)[order]
    before = np.cumsum(several) - several
    lines = [first[order], lengths[order], context[order], rows[order], before, *(line[order] for line in more)]
    return np.stack(lines).astype(np.int32), decodes


def describe_units(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], sample: NDArray[np.bool_], padding: int = 0
) -> tuple[NDArray[np.int32], int]:
    """(what `StepArrays.sequences` begins with, how many of them have one query) for units of work in a step's order:
    the next lengths[i] tokens of rows[i]. The contexts are left to the device.

    `padding` adds so many sequences of one query that are none, behind those of one query; all others must be such.
    """
    first = np.cumsum(lengths) - lengths
    sampled = np.where(sample, np.cumsum(sample) - 1, -1)
    units, decodes = describe(lengths, first, np.zeros_like(rows), rows, sampled)
    if not padding:
        return units, decodes
    if decodes != len(rows):
        raise ValueError(f"a step of {len(rows) - decodes} prompts cannot be padded: only steps that all decode can")
    filled = np.array([0, 1, 0, -1, 0, -1], np.int32)[:, None].repeat(padding, 1)
    filled[0] = len(rows) + np.arange(padding)
    return np.concatenate([units, filled], 1), decodes + padding
