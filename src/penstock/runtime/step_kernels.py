"""Step kernels: what a step takes beside the model. They fill its inputs, choose tokens and advance the batch.

There are three providers of the one interface: native C++ on a CPU (programs/recorded.py records them), Triton on a
GPU, and plain torch and NumPy, which define the results and run everywhere.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.batch_arrays import (
    BATCH_ROW,
    CONTEXT,
    DRAFTS,
    FIRST,
    LENGTH,
    LOGITS,
    BatchRows,
    Chosen,
    EditRows,
    MaskRows,
    SamplingRows,
    StepArrays,
)
from penstock.runtime.sampling import reference
from penstock.runtime.sampling.watermark import Watermark


class StepKernels(Protocol):
    """One provider. Arrays are described in kernels/batch_arrays.py."""

    decodes_first: bool  # whether attention needs the sequences of one token first

    def fill(self, state: BatchRows, step: StepArrays, sequences: int, block_size: int) -> None:
        """Fill in the contexts of the step's first `sequences` units, and the inputs of all of their tokens."""

    def choose(
        self,
        logits: Tensor,
        logit_rows: Tensor,
        sampling: SamplingRows,
        edits: EditRows,
        token_ids: Tensor,
        *,
        edited: Tensor | None,
        filtered: bool,
        logprobs: int,
        masks: MaskRows | None = None,
    ) -> Chosen:
        """The next token of each row of fp32 logits [n, vocab], which may be overwritten.

        `logit_rows` [LOGIT_LINES, n] says which row of the batch each belongs to; `token_ids` [rows of the batch, most]
        are the batch's. int32 `edited` [m] are the rows of logits that have edits (None: none); `filtered` says whether
        any row's kind is FILTERED or TOP_K. The result has `logprobs` alternatives packed for every row; -1: none.
        `masks`, applied after the edits, are those of the step (None: no row has one).
        """

    def score(self, logits: Tensor, targets: Tensor, k: int, sampling: SamplingRows, edits: EditRows) -> Tensor:
        """Packed logprobs of int64 `targets` [n] with k alternatives each, from raw fp32 logits [n, vocab]."""

    def advance(self, state: BatchRows, step: StepArrays, sequences: int, tokens: Tensor, outputs: Tensor) -> None:
        """Count the tokens of the step's first `sequences` units as computed; append int64 `tokens` [rows of logits].

        The drafts of a unit before the first one that was not sampled are accepted; the sampled token after them
        follows. int32 `outputs` [rows of the batch] are counted up, and `step.accepted` says how many each gained.
        """


def triton_step(watermark: Watermark | None = None) -> StepKernels:
    """The kernels of kernels/triton/. Imports triton. ValueError for a watermark, which they have not."""
    if watermark is not None:
        raise ValueError(f"the watermark {watermark.scheme} needs a CPU: a GPU's kernels have none; leave it out")
    return TritonStep()


class TritonStep:
    """On a GPU."""

    decodes_first = True

    def __init__(self) -> None:
        from penstock.kernels.triton.batch import advance, fill  # here and not above: only GPUs have Triton
        from penstock.kernels.triton.sampling.choose import choose, score

        self.fill, self.advance, self.choose, self.score = fill, advance, choose, score


class ReferenceStep:
    """On a CPU, in torch and NumPy: a loop over sequences."""

    decodes_first = True
    score = staticmethod(reference.score)

    def __init__(self, watermark: Watermark | None = None) -> None:
        self.choose = partial(reference.choose, watermark=watermark)

    def fill(self, state: BatchRows, step: StepArrays, sequences: int, block_size: int) -> None:
        for unit in step.units[:, :sequences].T:
            first, length, row = (int(unit[line]) for line in (FIRST, LENGTH, BATCH_ROW))
            tokens = slice(first, first + length)
            if row < 0:
                unit[CONTEXT] = 0
                step.token_ids[tokens] = step.positions[tokens] = step.offsets[tokens] = 0
                step.blocks[:, tokens] = -1
                continue
            before = int(state.computed[row])
            unit[CONTEXT] = before + length
            position = torch.arange(before, before + length)
            step.token_ids[tokens] = state.token_ids[row, position].long()
            step.positions[tokens] = position
            step.offsets[tokens] = position % block_size
            step.blocks[:, tokens] = state.tables[:, row, position // block_size].long()

    def advance(self, state: BatchRows, step: StepArrays, sequences: int, tokens: Tensor, outputs: Tensor) -> None:
        for unit in step.units[:, :sequences].T.tolist():
            row, drafts = unit[BATCH_ROW], unit[DRAFTS]
            if row < 0:
                continue
            known, gained = unit[CONTEXT] - drafts, 0
            if unit[LOGITS] >= 0:
                sampled = tokens[unit[LOGITS] : unit[LOGITS] + 1 + drafts].int()
                drafted = state.token_ids[row, known : known + drafts]
                gained = 1 + int((drafted == sampled[:drafts]).int().cumprod(0).sum())
                state.token_ids[row, known : known + gained] = sampled[:gained]
                outputs[row] += gained
                step.accepted[unit[LOGITS]] = gained
            state.computed[row] = known + max(gained - 1, 0)
