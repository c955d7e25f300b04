"""Summarises every block of all rows of logits in one kernel launch. Sampling and logprobs use the summary."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.batch_arrays import FILTERED, PLAIN, SamplingRows
from penstock.kernels.triton.sampling.noise import hash_tokens, noise_key, rough_gumbel

BLOCK = 4096  # tokens
LANES = 64  # of a block: the largest logit of each is kept, to find a lower bound of the k-th largest


@dataclass(frozen=True)
class RowSummary:
    """The summary of every block of every row of logits: [rows, blocks]."""

    tops: Tensor  # fp32: the greatest logit
    top_tokens: Tensor  # int32: the first token that has it
    sums: Tensor  # fp32: the sum of exp(logit - top)
    invalid: Tensor  # int32: number of logits that are NaN or +inf
    masses: Tensor  # fp64: the sum of exp((logit - top) / temperature), set for rows with a filter
    rough_scores: Tensor  # fp32: greatest (logit - top) / temperature + rough noise; set for PLAIN rows
    lanes: Tensor  # fp32 [rows, blocks * LANES]: the greatest logit of every 64 tokens

    @classmethod
    def of(cls, logits: Tensor, rows: Tensor, outputs: Tensor, parameters: SamplingRows) -> "RowSummary":
        """Summarises fp32 logits [n, vocab]. int32 [n]: `rows` of the batch and how many `outputs` each has."""
        count, vocab = logits.shape
        blocks = triton.cdiv(vocab, BLOCK)

        def empty(dtype: torch.dtype, width: int = blocks) -> Tensor:
            return torch.empty(count, width, dtype=dtype, device=logits.device)

        summary = cls(
            empty(torch.float32),
            empty(torch.int32),
            empty(torch.float32),
            empty(torch.int32),
            empty(torch.float64),
            empty(torch.float32),
            empty(torch.float32, blocks * LANES),
        )
        if count:
            _summarise[(count, blocks)](
                logits,
                rows,
                parameters.kind,
                parameters.temperature,
                parameters.streams,
                outputs,
                summary.tops,
                summary.top_tokens,
                summary.sums,
                summary.invalid,
                summary.masses,
                summary.rough_scores,
                summary.lanes,
                vocab,
                blocks,
                BLOCK=BLOCK,
                LANES=LANES,
                PLAIN=PLAIN,
                FILTERED=FILTERED,
                num_warps=8,
            )
        return summary


@triton.jit
def _summarise(
    logits,
    rows,
    kinds,
    temperatures,
    streams,
    outputs,
    tops,
    top_tokens,
    sums,
    invalid,
    masses,
    rough_scores,
    lanes,
    vocab,
    blocks,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    PLAIN: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Each program summarises one block of one row."""
    logit_row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows + logit_row)
    kind = tl.load(kinds + row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + logit_row * vocab + token, mask=token < vocab, other=float("-inf"))
    top = tl.max(value, 0)
    out = logit_row * blocks + block
    tl.store(tops + out, top)
    tl.store(top_tokens + out, tl.min(tl.where(value == top, token, vocab), 0))
    tl.store(invalid + out, tl.sum(((value != value) | (value == float("inf"))).to(tl.int32), 0))
    reference = tl.where(top == float("-inf"), 0.0, top)  # if every token of the block is banned
    tl.store(sums + out, tl.sum(tl.exp(value - reference), 0))
    lane_tops = tl.max(tl.reshape(value, [LANES, BLOCK // LANES]), 1)
    tl.store(lanes + out * LANES + tl.arange(0, LANES), lane_tops)
    if kind == PLAIN:
        k0, k1 = noise_key(tl.load(streams + row), tl.load(outputs + logit_row))
        log_p = (value - reference) / tl.load(temperatures + row).to(tl.float32)
        tl.store(rough_scores + out, tl.max(log_p + rough_gumbel(hash_tokens(token, k0, k1)), 0))
    if kind >= FILTERED:
        log_p = (value.to(tl.float64) - reference.to(tl.float64)) / tl.load(temperatures + row)
        tl.store(masses + out, tl.sum(tl.exp(log_p), 0))
