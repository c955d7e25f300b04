"""Packs the logprobs of chosen tokens and of the k best tokens (layout: messages/logprobs.py).

Logprobs are those of the raw logits; the whole distribution is never written to memory. The k best are picked one by
one from the few tokens that reach the k-th largest of the summary's lane maxima.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.sampling.filters import CHUNK, LISTED, ahead, contenders, floor_of_best, list_reaching
from penstock.kernels.triton.sampling.row_summary import LANES, RowSummary


def pack_logprobs(logits: Tensor, tokens: Tensor, summary: RowSummary, k: int) -> Tensor:
    """Returns int32 [n, 3 + 2 k]: packed logprobs of int64 tokens [n] with k alternatives each, from fp32 logits
    [n, vocab] and their summary. A rank is 1 + the number of greater logits; equal logits are in order of tokens."""
    count, vocab = logits.shape
    out = torch.empty(count, 3 + 2 * k, dtype=torch.int32, device=logits.device)
    if not count:
        return out
    if k > vocab:
        raise ValueError(f"{k} logprobs of a vocabulary of {vocab}: ask for {vocab} at most")
    blocks = summary.tops.shape[1]
    _pack_logprobs[(count,)](
        logits,
        tokens,
        summary.tops,
        summary.sums,
        summary.lanes,
        torch.empty(count, LISTED, dtype=torch.int32, device=logits.device),
        out,
        out.view(torch.float32),
        vocab,
        blocks,
        k,
        LISTED=LISTED,
        CHUNK=CHUNK,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK_LANES=LANES,
        LANES=triton.next_power_of_2(blocks * LANES),
        num_warps=8,
    )
    return out


@triton.jit(do_not_specialize=["k"])
def _pack_logprobs(
    logits,
    tokens,
    tops,
    sums,
    lanes,
    listings,
    out,
    out_floats,
    vocab,
    blocks,
    k,
    LISTED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Each program packs one row."""
    nth = tl.program_id(0).to(tl.int64)
    logits += nth * vocab
    listing = listings + nth * LISTED
    words = nth * (3 + 2 * k)
    each = tl.arange(0, BLOCKS)
    block_tops = tl.load(tops + nth * blocks + each, mask=each < blocks, other=float("-inf"))
    parts = tl.load(sums + nth * blocks + each, mask=each < blocks, other=0.0)
    top = tl.max(block_tops, 0)
    normaliser = top + tl.log(tl.sum(parts * tl.exp(block_tops - top), 0))

    token = tl.load(tokens + nth)
    chosen = tl.load(logits + token)
    greater = tl.zeros([CHUNK], tl.int32)
    for start in range(0, vocab, CHUNK):
        place = start + tl.arange(0, CHUNK)
        greater += (tl.load(logits + place, mask=place < vocab, other=float("-inf")) > chosen).to(tl.int32)
    tl.store(out + words, token.to(tl.int32))
    tl.store(out_floats + words + 1, chosen - normaliser)
    tl.store(out + words + 2, 1 + tl.sum(greater, 0))

    if k > 0:
        floor = floor_of_best(lanes + nth * blocks * BLOCK_LANES, blocks * BLOCK_LANES, k, LANES)
        size = list_reaching(logits, listing, vocab, floor, CHUNK, LISTED)
        listed = size <= LISTED
        size = tl.where(listed, size, vocab)
        border = tl.full([], float("inf"), tl.float32)  # logit and token of the last pick; the next one ranks behind it
        last = tl.full([], -1, tl.int32)
        for rank in range(k):
            value, pick = _next_best(logits, listing, size, listed, border, last, vocab, CHUNK)
            tl.store(out + words + 3 + 2 * rank, pick)
            tl.store(out_floats + words + 4 + 2 * rank, value - normaliser)
            border, last = value, pick


@triton.jit
def _next_best(logits, listing, size, listed, border, last, vocab, CHUNK: tl.constexpr):
    """(logit, token) of the best contender ranked behind (border, last)."""
    best = tl.full([], float("-inf"), tl.float32)
    pick = vocab + tl.zeros([], tl.int32)
    for start in range(0, size, CHUNK):
        token, value, real = contenders(logits, listing, start, size, listed, CHUNK)
        behind = real & ~ahead(token, value, border, last) & (token != last)
        top = tl.max(tl.where(behind, value, float("-inf")), 0)
        place = tl.min(tl.where(behind & (value == top), token, vocab), 0)
        if (place < vocab) & ((top > best) | (pick == vocab)):
            best = top
            pick = place
    return best, pick
