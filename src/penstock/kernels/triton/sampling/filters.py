"""Samples from the tokens that top_n_sigma, top_k, top_p and min_p keep, without a sort.

The summary gives a floor: a logit that every kept token reaches, and few others. The tokens that reach it are listed
first. top_k finds the k-th largest logit by bisecting the bits of floats. top_p samples first, then checks that the
mass ahead of the sampled token is below top_p; if not, it samples again from the tokens ahead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.batch_arrays import FILTERED, TOP_K, SamplingRows
from penstock.kernels.triton.sampling.noise import gumbel, hash_tokens, noise_key
from penstock.kernels.triton.sampling.row_summary import LANES, RowSummary

LISTED = 16384  # the most tokens of a row that are listed; with more, the kernels read the whole vocabulary
CHUNK = 2048  # tokens that a program reads at once


def draw_filtered(
    logits: Tensor,
    rows: Tensor,
    outputs: Tensor,
    parameters: SamplingRows,
    summary: RowSummary,
    tokens: Tensor,
    status: Tensor,
) -> None:
    """Replaces the tokens of the rows whose kind is FILTERED or TOP_K. Arguments are as in `sample`."""
    count, vocab = logits.shape
    blocks = summary.tops.shape[1]
    _draw_filtered[(count,)](
        logits,
        rows,
        parameters.kind,
        parameters.temperature,
        parameters.top_k,
        parameters.top_p,
        parameters.min_p,
        parameters.top_n_sigma,
        parameters.streams,
        outputs,
        summary.tops,
        summary.masses,
        summary.lanes,
        torch.empty(count, LISTED, dtype=torch.int32, device=logits.device),
        tokens,
        status,
        vocab,
        blocks,
        FILTERED=FILTERED,
        TOP_K=TOP_K,
        LISTED=LISTED,
        CHUNK=CHUNK,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK_LANES=LANES,
        LANES=triton.next_power_of_2(blocks * LANES),
        num_warps=8,
    )


@triton.jit
def ordered(values):
    """Maps fp32 to uint32 so that the order stays the same and -0 equals 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def logit_of(key):
    """The inverse of `ordered`."""
    return tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def floor_of_best(lanes, count, k, LANES: tl.constexpr):
    """A logit that at least k tokens reach, and few more: the k-th largest of the lanes' maxima; -inf if k exceeds the
    number of lanes."""
    each = tl.arange(0, LANES)
    keys = ordered(tl.load(lanes + each, mask=each < count, other=float("-inf")))
    keys = tl.where(each < count, keys, 0)
    found = tl.zeros([], tl.uint32)
    for i in range(32):
        trial = found | (tl.full([], 1, tl.uint32) << (31 - i))
        found = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= k, trial, found)
    return tl.where(k <= count, logit_of(found), float("-inf"))


@triton.jit
def list_reaching(logits, listing, vocab, floor, CHUNK: tl.constexpr, LISTED: tl.constexpr):
    """Lists the first LISTED tokens whose logits are at least `floor`, ascending. Returns how many there are in all."""
    size = tl.zeros([], tl.int32)
    for start in range(0, vocab, CHUNK):
        token = start + tl.arange(0, CHUNK)
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        reaching = (token < vocab) & (value >= floor)
        place = size + tl.cumsum(reaching.to(tl.int32), 0) - 1
        tl.store(listing + place, token, mask=reaching & (place < LISTED))
        size += tl.sum(reaching.to(tl.int32), 0)
    tl.debug_barrier()  # other threads read the list that these threads wrote
    return size


@triton.jit
def contenders(logits, listing, start, size, listed, CHUNK: tl.constexpr):
    """(tokens, logits, mask of valid ones) of CHUNK entries of the list, or of the vocabulary if `listed` is False."""
    place = start + tl.arange(0, CHUNK)
    real = place < size
    token = tl.where(listed, tl.load(listing + place, mask=real & listed, other=0), place)
    return token, tl.load(logits + token, mask=real, other=float("-inf")), real


@triton.jit
def ahead(token, value, border, limit):
    """Mask of the tokens ranked before (logit `border`, token `limit`): greater logits first, then lower tokens."""
    return (value > border) | ((value == border) & (token < limit))


@triton.jit
def border_of_best(logits, listing, size, listed, k, CHUNK: tl.constexpr):
    """The (logit, token limit) that has exactly the k best contenders ahead of it."""
    _, value, real = contenders(logits, listing, 0, size, listed, CHUNK)
    keys = tl.where(real, ordered(value), 0)  # the first chunk stays in registers; there are rarely more chunks
    found = tl.zeros([], tl.uint32)
    for i in range(32):
        trial = found | (tl.full([], 1, tl.uint32) << (31 - i))
        enough = tl.sum((keys >= trial).to(tl.int32), 0)
        for start in range(CHUNK, size, CHUNK):
            _, more, there = contenders(logits, listing, start, size, listed, CHUNK)
            enough += tl.sum((there & (ordered(more) >= trial)).to(tl.int32), 0)
        found = tl.where(enough >= k, trial, found)
    border = logit_of(found)
    left = k
    for start in range(0, size, CHUNK):
        _, value, real = contenders(logits, listing, start, size, listed, CHUNK)
        left -= tl.sum((real & (value > border)).to(tl.int32), 0)
    limit = tl.zeros([], tl.int32)
    for start in range(0, size, CHUNK):
        token, value, real = contenders(logits, listing, start, size, listed, CHUNK)
        equal = real & (value == border)
        kept = equal & (tl.cumsum(equal.to(tl.int32), 0) <= left)
        limit = tl.maximum(limit, tl.max(tl.where(kept, token + 1, 0), 0))
        left -= tl.sum(equal.to(tl.int32), 0)
    return border, limit


@triton.jit
def mass_ahead(logits, listing, size, listed, border, limit, peak, temperature, CHUNK: tl.constexpr):
    """The sum of exp((logit - peak) / temperature) over the contenders ahead of (border, limit), in fp64."""
    mass = tl.zeros([], tl.float64)
    for start in range(0, size, CHUNK):
        token, value, real = contenders(logits, listing, start, size, listed, CHUNK)
        weight = tl.exp((value.to(tl.float64) - peak) / temperature)
        mass += tl.sum(tl.where(real & ahead(token, value, border, limit), weight, 0.0), 0)
    return mass


@triton.jit
def deviation(logits, vocab, peak, CHUNK: tl.constexpr):
    """The standard deviation of the logits that are not -inf, in fp64. `peak` is the greatest of them."""
    count = tl.zeros([], tl.float64)
    total = tl.zeros([], tl.float64)
    squares = tl.zeros([], tl.float64)
    for start in range(0, vocab, CHUNK):
        token = start + tl.arange(0, CHUNK)
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        counted = value > float("-inf")
        below = tl.where(counted, value.to(tl.float64) - peak, 0.0)
        count += tl.sum(counted.to(tl.float64), 0)
        total += tl.sum(below, 0)
        squares += tl.sum(below * below, 0)
    mean = total / count
    return tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))


@triton.jit
def mass_reaching(logits, vocab, least, peak, temperature, CHUNK: tl.constexpr):
    """The sum of exp((logit - peak) / temperature) over the logits that reach `least`, in fp64."""
    mass = tl.zeros([], tl.float64)
    for start in range(0, vocab, CHUNK):
        token = start + tl.arange(0, CHUNK)
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float64)
        mass += tl.sum(tl.where(value >= least, tl.exp((value - peak) / temperature), 0.0), 0)
    return mass


@triton.jit
def winner(logits, listing, size, listed, border, limit, least, peak, temperature, k0, k1, CHUNK: tl.constexpr):
    """(logit, token) of the greatest log p + noise among contenders that reach `least`, ahead of (border, limit)."""
    score = tl.full([], float("-inf"), tl.float64)
    logit = tl.full([], float("-inf"), tl.float32)
    chosen = tl.zeros([], tl.int32)
    for start in range(0, size, CHUNK):
        token, value, real = contenders(logits, listing, start, size, listed, CHUNK)
        wide = value.to(tl.float64)
        kept = real & ahead(token, value, border, limit) & (wide >= least)
        noisy = tl.where(kept, (wide - peak) / temperature + gumbel(hash_tokens(token, k0, k1)), float("-inf"))
        best = tl.max(noisy, 0)
        if best > score:  # of equal scores the first wins
            score = best
            chosen = tl.min(tl.where(noisy == best, token, 0x7FFFFFFF), 0)
            logit = tl.max(tl.where(token == chosen, value, float("-inf")), 0)
    return logit, chosen


@triton.jit
def _draw_filtered(
    logits,
    rows,
    kinds,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    top_n_sigmas,
    streams,
    outputs,
    tops,
    masses,
    lanes,
    listings,
    tokens,
    status,
    vocab,
    blocks,
    FILTERED: tl.constexpr,
    TOP_K: tl.constexpr,
    LISTED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row to a program."""
    nth = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + nth)
    kind = tl.load(kinds + row)
    if (kind < FILTERED) | (tl.load(status + nth) != 0):
        return
    logits += nth * vocab
    listing = listings + nth * LISTED
    temperature, top_p, min_p = tl.load(temperatures + row), tl.load(top_ps + row), tl.load(min_ps + row)
    best = tl.load(tokens + nth).to(tl.int32)
    peak = tl.load(logits + best).to(tl.float64)
    each = tl.arange(0, BLOCKS)
    block_tops = tl.load(tops + nth * blocks + each, mask=each < blocks, other=float("-inf")).to(tl.float64)
    parts = tl.load(masses + nth * blocks + each, mask=each < blocks, other=0.0)
    mass = tl.sum(parts * tl.exp((block_tops - peak) / temperature), 0)
    reach = tl.full([], float("-inf"), tl.float64)  # what top_n_sigma keeps
    top_n_sigma = tl.load(top_n_sigmas + row)
    if top_n_sigma > 0.0:
        reach = peak - top_n_sigma * deviation(logits, vocab, peak, CHUNK)
        if (kind == FILTERED) & (top_p < 1.0):
            mass = mass_reaching(logits, vocab, reach, peak, temperature, CHUNK)
    least = reach
    if min_p > 0.0:
        least = tl.maximum(least, peak + temperature * tl.log(min_p))

    k = tl.load(top_ks + row)
    if kind == TOP_K:
        floor = floor_of_best(lanes + nth * blocks * BLOCK_LANES, blocks * BLOCK_LANES, k, LANES).to(tl.float64)
        floor = tl.maximum(floor, reach)
    else:
        # A kept token has less than top_p of the mass ahead of it, so it and the tokens behind it hold more than
        # 1 - top_p. These are at most `vocab` tokens, none heavier than it. 0.001 covers rounding.
        floor = least
        if top_p < 1.0:
            share = tl.log((1.0 - top_p) * mass / vocab) - 0.001
            floor = tl.maximum(floor, peak + temperature * share)
    size = list_reaching(logits, listing, vocab, floor, CHUNK, LISTED)
    k = tl.minimum(k, size)  # top_n_sigma may keep fewer
    listed = size <= LISTED
    size = tl.where(listed, size, vocab)
    border = tl.full([], float("-inf"), tl.float32)
    limit = tl.zeros([], tl.int32) + vocab
    if kind == TOP_K:
        border, limit = border_of_best(logits, listing, size, listed, k, CHUNK)
        if top_p < 1.0:
            mass = mass_ahead(logits, listing, size, listed, border, limit, peak, temperature, CHUNK)

    k0, k1 = noise_key(tl.load(streams + row), tl.load(outputs + nth))
    chosen = best
    drawing = vocab > 0
    while drawing:
        border, chosen = winner(logits, listing, size, listed, border, limit, least, peak, temperature, k0, k1, CHUNK)
        limit = chosen
        drawing = (top_p < 1.0) & (chosen != best)
        if drawing:
            share = mass_ahead(logits, listing, size, listed, border, limit, peak, temperature, CHUNK)
            drawing = share >= top_p * mass
    tl.store(tokens + nth, chosen.to(tl.int64))
