"""The arrays of a batch: what its rows hold, what a step's kernels read and write, and how rows are sampled.

On a GPU they are in its memory, on a CPU in the host's. The step kernels (runtime/step_kernels.py) work on them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.messages import Window

# Lines of `StepArrays.units`: one column for each sequence of a step.
FIRST, LENGTH, CONTEXT, BATCH_ROW, BEFORE, LOGITS, DRAFTS = range(7)
UNIT_LINES = 7
# Lines of `StepArrays.logit_rows`: one column for each row of logits.
ROW, TOKEN, AHEAD = range(3)
LOGIT_LINES = 3

# How a row's token is chosen: the best one; drawn from all; from what filters keep; from the top_k best.
GREEDY, PLAIN, FILTERED, TOP_K = range(4)

CHOSEN, NOT_FINITE, ALL_BANNED = range(3)  # the status of a row of logits


def _zeros(device: torch.device | str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class BatchRows:
    """The tokens and blocks of each row of the batch, int32."""

    token_ids: Tensor  # [rows, most tokens + 1]; drafts that are being verified lie behind the known tokens
    computed: Tensor  # [rows]: tokens whose keys and values are stored
    tables: Tensor  # [KV groups, rows, blocks]

    @classmethod
    def empty(cls, rows: int, tokens: int, groups: int, blocks: int, device: torch.device) -> "BatchRows":
        i32 = torch.int32
        return cls(
            _zeros(device, i32, rows, tokens + 1), _zeros(device, i32, rows), _zeros(device, i32, groups, rows, blocks)
        )


@dataclass(frozen=True)
class StepArrays:
    """The inputs of a step, with room for the largest one: a captured step finds them at one address.

    `units` has, for each sequence: its first token among the step's, how many tokens it computes, its context (these
    included; filled in by `fill`), its row of the batch (-1: padding), how many tokens the sequences of several tokens
    before it compute (for sequences of several tokens), its first row of logits (-1: none), and how many of its tokens
    are drafts. A sequence that samples has 1 + drafts rows of logits, those of its last tokens.

    `logit_rows` has, for each row of logits: the row of the batch, the token among the step's that it follows, and how
    many drafts lie between the sequence's known tokens and it.
    """

    units: Tensor  # int32 [UNIT_LINES, sequences]
    logit_rows: Tensor  # int32 [LOGIT_LINES, rows of logits]
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    blocks: Tensor  # int64 [KV groups, tokens]: where keys and values go; -1: nowhere
    offsets: Tensor  # int64 [tokens]: where in the block
    accepted: Tensor  # int32 [rows of logits]: how many tokens a sequence gained, at its first row; see `advance`

    @classmethod
    def empty(
        cls, sequences: int, logit_rows: int, tokens: int, groups: int, device: torch.device | str
    ) -> "StepArrays":
        i32, i64 = torch.int32, torch.int64
        return cls(
            _zeros(device, i32, UNIT_LINES, sequences),
            _zeros(device, i32, LOGIT_LINES, logit_rows),
            _zeros(device, i64, tokens),
            _zeros(device, i64, tokens),
            _zeros(device, i64, groups, tokens),
            _zeros(device, i64, tokens),
            _zeros(device, i32, logit_rows),
        )


@dataclass(frozen=True)
class StepSequences:
    """The sequences of a step as attention on a device reads them, for one KV group.

    `units` are the lines FIRST to BEFORE of `StepArrays.units`. Sequences of one token come first. A context of 0 is
    padding: its query's result is 0.
    """

    window: Window
    units: Tensor  # int32 [at least 5, at least `decodes + prompts`]
    tables: Tensor  # int32 [rows, blocks]
    decodes: int  # sequences of one token
    prompts: int  # sequences of several
    prompt_queries: int  # tokens of all of these
    longest: int  # the most tokens of any of them


@dataclass(frozen=True)
class SamplingRows:
    """How each row of the batch is sampled: arrays [rows]."""

    kind: Tensor  # int32: GREEDY, PLAIN, FILTERED or TOP_K
    temperature: Tensor  # fp64, as are the next three
    top_p: Tensor
    min_p: Tensor
    top_n_sigma: Tensor  # 0: off
    top_k: Tensor  # int32; 0: off
    streams: Tensor  # int64: the bits of noise.stream
    outputs: Tensor  # int32: how many tokens the choice has; counted up by `advance`
    logprobs: Tensor  # int32: how many of the best tokens are scored; -1: no logprobs at all

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> "SamplingRows":
        i32, f64 = torch.int32, torch.float64
        dtypes = (i32, f64, f64, f64, f64, i32, torch.int64, i32, i32)
        return cls(*(_zeros(device, dtype, rows) for dtype in dtypes))


@dataclass(frozen=True)
class EditRows:
    """Penalties, biases and bans, which edit a row's logits before a token is chosen: arrays [rows] or [rows, most]."""

    repetition: Tensor  # fp32; 1: none
    presence: Tensor  # fp32
    frequency: Tensor  # fp32
    bias_count: Tensor  # int32
    bias_ids: Tensor  # int32, distinct
    biases: Tensor  # fp32
    ban_count: Tensor  # int32
    ban_ids: Tensor  # int32
    min_tokens: Tensor  # int32: while there are fewer outputs, the ban holds
    prompt: Tensor  # int32: tokens of the prompt

    @classmethod
    def empty(cls, rows: int, most_biases: int, most_bans: int, device: torch.device | str) -> "EditRows":
        i32, f32 = torch.int32, torch.float32
        return cls(
            _zeros(device, f32, rows) + 1,
            _zeros(device, f32, rows),
            _zeros(device, f32, rows),
            _zeros(device, i32, rows),
            _zeros(device, i32, rows, most_biases),
            _zeros(device, f32, rows, most_biases),
            _zeros(device, i32, rows),
            _zeros(device, i32, rows, most_bans),
            _zeros(device, i32, rows),
            _zeros(device, i32, rows),
        )


@dataclass(frozen=True)
class MaskRows:
    """Which tokens the rows of logits of a step may get. A mask has a bit for each token, set where it may be chosen.
    Bits are in the order of the tokens, the lowest of an int32 first."""

    lines: Tensor  # int32 [rows of logits]: the line of `words` with the row's mask; -1: it has none
    words: Tensor  # int32 [rows of logits, vocab / 32]

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device | str) -> "MaskRows":
        return cls(_zeros(device, torch.int32, rows) - 1, _zeros(device, torch.int32, rows, -(-vocab // 32)))


class Chosen(NamedTuple):
    """The next token of every row of logits."""

    tokens: Tensor  # int64 [n]; 0 where the status is not CHOSEN
    status: Tensor  # int32 [n]: CHOSEN; NOT_FINITE, where a raw logit is NaN or +inf or all are -inf; or ALL_BANNED
    packed: Tensor | None = None  # int32 [n, words]: logprobs as messages/logprobs.py packs them, if requested


def order_units(
    lengths: NDArray[np.int64],
    first: NDArray[np.int64],
    context: NDArray[np.int64],
    rows: NDArray[np.int64],
    *more: NDArray[np.int64],
    decodes_first: bool = True,
) -> tuple[NDArray[np.int32], int]:
    """Returns lines of `StepArrays.units`, FIRST to BEFORE and then `more`, and how many sequences have one token.

    All arrays are [sequences]. With `decodes_first`, sequences of one token come first.
    """
    order = np.argsort(lengths != 1, kind="stable") if decodes_first else np.arange(len(lengths))
    decodes = int((lengths == 1).sum())
    several = np.where(lengths == 1, 0, lengths)[order]
    before = np.cumsum(several) - several
    lines = [first[order], lengths[order], context[order], rows[order], before, *(line[order] for line in more)]
    return np.stack(lines).astype(np.int32), decodes


def pad_units(units: NDArray[np.int32], padding: int) -> NDArray[np.int32]:
    """Returns `units` with so many sequences behind them that only fill a captured step. All units have one token."""
    count = units.shape[1]
    if (units[LENGTH] != 1).any():
        raise ValueError(f"a step of {(units[LENGTH] != 1).sum()} prompts cannot be padded: only decode steps can")
    filled = np.array([0, 1, 0, -1, 0, -1, 0], np.int32)[:, None].repeat(padding, 1)
    filled[FIRST] = count + np.arange(padding)
    return np.concatenate([units, filled], 1)
