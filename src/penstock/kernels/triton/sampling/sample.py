"""Samples the next token of every row of logits: the one with the greatest log p + noise among those the filters keep.

runtime/sampling/reference.py defines the tokens and runtime/sampling/noise.py the noise. Nothing is sorted. The few
tokens that can win are scored in fp64, so that the same logits give the same tokens as on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.batch_arrays import PLAIN, SamplingRows
from penstock.kernels.triton.sampling.filters import draw_filtered
from penstock.kernels.triton.sampling.noise import gumbel, hash_tokens, noise_key
from penstock.kernels.triton.sampling.row_summary import BLOCK, RowSummary

CLOSE = 1e-3  # blocks whose rough scores are within this of the best are computed again: 100 times the error


def sample(
    logits: Tensor, rows: Tensor, outputs: Tensor, parameters: SamplingRows, summary: RowSummary, *, filtered: bool
) -> tuple[Tensor, Tensor]:
    """Returns int64 tokens [n] and int32 statuses [n] of fp32 logits [n, vocab].

    int32 [n]: `rows` are the rows of the batch; `outputs` is the number of output tokens before each row of logits,
    drafts included. `filtered` is True if any row's kind is FILTERED or TOP_K.
    """
    count, vocab = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    status = torch.empty(count, dtype=torch.int32, device=logits.device)
    if not count:
        return tokens, status
    blocks = summary.tops.shape[1]
    _choose[(count,)](
        logits,
        rows,
        parameters.kind,
        parameters.temperature,
        parameters.streams,
        outputs,
        summary.tops,
        summary.top_tokens,
        summary.invalid,
        summary.rough_scores,
        tokens,
        status,
        vocab,
        blocks,
        PLAIN=PLAIN,
        CLOSE=CLOSE,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=8,
    )
    if filtered:
        draw_filtered(logits, rows, outputs, parameters, summary, tokens, status)
    return tokens, status


@triton.jit
def _choose(
    logits,
    rows,
    kinds,
    temperatures,
    streams,
    outputs,
    tops,
    top_tokens,
    invalid,
    rough_scores,
    tokens,
    status,
    vocab,
    blocks,
    PLAIN: tl.constexpr,
    CLOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Each program chooses for one row: the best token, or for PLAIN rows the one with the greatest score."""
    nth = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + nth)
    each = tl.arange(0, BLOCKS)
    inside = each < blocks
    block_tops = tl.load(tops + nth * blocks + each, mask=inside, other=float("-inf"))
    top = tl.max(block_tops, 0)
    bad = tl.sum(tl.load(invalid + nth * blocks + each, mask=inside, other=0), 0)
    sound = (bad == 0) & (top > float("-inf"))
    tl.store(status + nth, tl.where(sound, 0, 1))
    first = tl.load(top_tokens + nth * blocks + each, mask=inside & (block_tops == top), other=vocab)
    token = tl.where(sound, tl.min(first, 0), 0)
    if sound & (tl.load(kinds + row) == PLAIN):
        temperature = tl.load(temperatures + row)
        peak = top.to(tl.float64)
        k0, k1 = noise_key(tl.load(streams + row), tl.load(outputs + nth))
        lead = tl.load(rough_scores + nth * blocks + each, mask=inside, other=float("-inf")).to(tl.float64)
        lead += tl.where(inside, (block_tops.to(tl.float64) - peak) / temperature, 0.0)
        least = tl.max(lead, 0) - CLOSE
        score = tl.full([], float("-inf"), tl.float64)
        for block in range(blocks):
            own = tl.load(tops + nth * blocks + block).to(tl.float64)
            reach = tl.load(rough_scores + nth * blocks + block).to(tl.float64) + (own - peak) / temperature
            if reach >= least:
                contender = block * BLOCK + tl.arange(0, BLOCK)
                value = tl.load(logits + nth * vocab + contender, mask=contender < vocab, other=float("-inf"))
                noisy = (value.to(tl.float64) - peak) / temperature + gumbel(hash_tokens(contender, k0, k1))
                best = tl.max(noisy, 0)
                if best > score:  # of equal scores the first wins
                    score = best
                    token = tl.min(tl.where(noisy == best, contender, vocab), 0)
    tl.store(tokens + nth, token.to(tl.int64))
