"""Chooses tokens on a GPU: edits the logits, summarises them, samples, and packs logprobs."""

import torch
from torch import Tensor

from penstock.kernels.batch_arrays import AHEAD, ALL_BANNED, CHOSEN, ROW, Chosen, EditRows, MaskRows, SamplingRows
from penstock.kernels.triton.sampling.edits import edit, mask
from penstock.kernels.triton.sampling.logprobs import pack_logprobs
from penstock.kernels.triton.sampling.row_summary import RowSummary
from penstock.kernels.triton.sampling.sample import sample


def choose(
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
    """The next token of each row of fp32 logits [n, vocab], which may be overwritten. See StepKernels.choose."""
    rows = logit_rows[ROW]
    outputs = sampling.outputs.index_select(0, rows) + logit_rows[AHEAD]
    raw, finite = logits, None
    if edited is not None or masks is not None:
        if logprobs >= 0:
            raw = logits.clone()
        finite = logits.amax(1).isfinite()  # the maximum of a row with a NaN is NaN
    if edited is not None:
        edit(logits, edited, rows, outputs, edits, token_ids)
    if masks is not None:
        mask(logits, masks)
    summary = RowSummary.of(logits, rows, outputs, sampling)
    tokens, status = sample(logits, rows, outputs, sampling, summary, filtered=filtered)
    if finite is not None:
        status = torch.where(finite & (status != CHOSEN), ALL_BANNED, status)
    if logprobs < 0:
        return Chosen(tokens, status)
    if raw is not logits:
        summary = RowSummary.of(raw, rows, outputs, sampling)
    return Chosen(tokens, status, pack_logprobs(raw, tokens, summary, logprobs))


def score(logits: Tensor, targets: Tensor, k: int, sampling: SamplingRows, edits: EditRows) -> Tensor:
    """int32 [n, 3 + 2 k]: packed logprobs of int64 `targets` [n] with k alternatives each, from fp32 [n, vocab]."""
    spare = torch.full((len(targets),), len(sampling.kind) - 1, dtype=torch.int32, device=logits.device)
    return pack_logprobs(logits, targets, RowSummary.of(logits, spare, torch.zeros_like(spare), sampling), k)
