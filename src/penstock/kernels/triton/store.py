"""Rotary positions, and the ops between projection and attention: norm and rotation of heads, and the KV cache's
store."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.config.facts import QueryTemperature
from penstock.kernels.triton.overlap import await_inputs, overlap
from penstock.kernels.triton.quantized import LIMITS, quantize, row_scale

TILE_ELEMENTS = 1024  # per program of four warps


def rotation(positions: Tensor, frequencies: Tensor, temperature: QueryTemperature | None = None) -> Tensor:
    """fp32 [tokens, 2, half]: cos and sin of int64 positions [tokens] times fp32 frequencies [2, half] (see
    PagedAttention). With a temperature [tokens, 4, half]: then those of queries."""
    tokens, half = len(positions), frequencies.shape[1]
    queries = temperature or QueryTemperature(0, 0.0)
    out = torch.empty(tokens, 2 if temperature is None else 4, half, dtype=torch.float32, device=positions.device)
    if tokens:
        block = triton.next_power_of_2(half)
        _rotation[(tokens,)](
            positions,
            frequencies,
            out,
            half,
            queries.scale,
            EVERY=queries.every,
            FIRST=queries.first,
            HALF=block,
            num_warps=1,
            **overlap(),
        )
    return out


def store(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    weight: Tensor | None,
    cos_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    offsets: Tensor,
    eps: float,
    offset: float,
) -> Tensor:
    """PagedAttention.store; with 0 `kv_heads` of queries only. A token with a negative block is not stored. Pages have
    qkv's dtype or fp8. In fp8 a head's part of a block is followed by its tokens' fp32 scales, which widens the pages'
    last dimension."""
    block_size = keys.shape[2]
    tokens, head_dim = len(qkv), qkv.shape[1] // (heads + 2 * kv_heads)
    query = qkv.new_empty(tokens, heads, head_dim)
    if not tokens:
        return query
    half = triton.next_power_of_2(head_dim // 2)
    rows = max(TILE_ELEMENTS // (2 * half), 1)
    quantized = keys.dtype != qkv.dtype
    _store[(triton.cdiv(tokens * (heads + 2 * kv_heads), rows),)](
        qkv,
        weight,
        cos_sin,
        blocks,
        offsets,
        query,
        keys,
        values,
        keys.view(torch.float32) if quantized else None,
        values.view(torch.float32) if quantized else None,
        tokens,
        heads,
        kv_heads,
        keys.stride(0),
        keys.stride(1),
        eps,
        offset,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NORMED=0 if weight is None else len(weight),
        HAS_OFFSET=offset != 0.0,
        TEMPERED=cos_sin.shape[1] == 4,
        LIMIT=LIMITS[keys.dtype] if quantized else 0.0,
        ROWS=rows,
        HALF=half,
        num_warps=4,
        **overlap(),
    )
    return query


@triton.jit
def _rotation(
    positions,
    frequencies,
    out,
    half,
    temperature,
    EVERY: tl.constexpr,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, HALF)
    position = tl.load(positions + token)
    angle = position.to(tl.float32) * tl.load(frequencies + place, mask=place < half, other=0.0)
    factor = tl.load(frequencies + half + place, mask=place < half, other=0.0)
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
    target = out + token * (2 if EVERY == 0 else 4) * half + place
    tl.store(target, cos, mask=place < half)
    tl.store(target + half, sin, mask=place < half)
    if EVERY > 0:
        passed = (position + FIRST) // EVERY
        tempered = 1.0 + temperature * tl.log(1.0 + passed.to(tl.float32))
        tl.store(target + 2 * half, cos * tempered, mask=place < half)
        tl.store(target + 3 * half, sin * tempered, mask=place < half)


@triton.jit
def _store_half(pages, where, part, inverse, mask, LIMIT: tl.constexpr):
    """Store half of each head's elements to pages."""
    if LIMIT == 0.0:
        tl.store(pages + where, part.to(pages.dtype.element_ty), mask=mask)
    else:
        tl.store(pages + where, quantize(part, inverse[:, None], pages.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _store(
    qkv,
    weight,
    cos_sin,
    blocks,
    offsets,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    tokens,
    heads,
    kv_heads,
    block_stride,
    head_stride,
    eps,
    offset,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,  # how many heads of a token are normed: queries, keys, values; or 0
    HAS_OFFSET: tl.constexpr,
    TEMPERED: tl.constexpr,  # whether queries have rotations of their own
    LIMIT: tl.constexpr,  # the largest quantised magnitude; 0: pages have qkv's dtype
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program computes some rows. A row is one head of one token: a query, key or value. A head is two halves,
    which the rotation exchanges."""
    await_inputs(OVERLAP)
    dtype = qkv.dtype.element_ty
    width = heads + 2 * kv_heads
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // width, (row % width).to(tl.int32)
    place = tl.arange(0, HALF)
    inside = (row < tokens * width)[:, None] & (place < HEAD_DIM // 2)[None, :]
    source = qkv + row[:, None] * HEAD_DIM + place[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    turned = head < heads + kv_heads
    turning = inside & turned[:, None]
    if NORMED > 0:
        with_norm = inside & (head < NORMED)[:, None]
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        factors = weight + head[:, None] * HEAD_DIM + place[None, :]
        factor_low = tl.load(factors, mask=with_norm, other=0.0).to(tl.float32)
        factor_high = tl.load(factors + HEAD_DIM // 2, mask=with_norm, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            normed_low = (low * scale * (factor_low + offset)).to(dtype).to(tl.float32)
            normed_high = (high * scale * (factor_high + offset)).to(dtype).to(tl.float32)
        else:
            normed_low = ((low * scale).to(dtype).to(tl.float32) * factor_low).to(dtype).to(tl.float32)
            normed_high = ((high * scale).to(dtype).to(tl.float32) * factor_high).to(dtype).to(tl.float32)
        low = tl.where((head < NORMED)[:, None], normed_low, low)
        high = tl.where((head < NORMED)[:, None], normed_high, high)
    if TEMPERED:
        first = token * 2 * HEAD_DIM + tl.where(head < heads, HEAD_DIM, 0)
    else:
        first = token * HEAD_DIM
    angles = cos_sin + first[:, None] + place[None, :]
    cos = tl.load(angles, mask=turning, other=1.0)
    sin = tl.load(angles + HEAD_DIM // 2, mask=turning, other=0.0)
    # Rounded to qkv's dtype: fp8 pages are quantised from the values that other pages hold.
    turned_low = (low * cos - high * sin).to(dtype).to(tl.float32)
    turned_high = (high * cos + low * sin).to(dtype).to(tl.float32)

    asking = inside & (head < heads)[:, None]
    target = query + (token[:, None] * heads + head[:, None]) * HEAD_DIM + place[None, :]
    tl.store(target, turned_low.to(dtype), mask=asking)
    tl.store(target + HEAD_DIM // 2, turned_high.to(dtype), mask=asking)

    block = tl.load(blocks + token, mask=row < tokens * width, other=-1)
    slot = tl.load(offsets + token, mask=row < tokens * width, other=0)
    kept = (block >= 0) & (head >= heads)
    are_keys = kept & turned
    are_values = kept & (head >= heads + kv_heads)
    kv_head = (head - heads) % tl.maximum(kv_heads, 1)
    page = block * block_stride + kv_head * head_stride
    inverse = slot
    if LIMIT > 0.0:
        largest = tl.maximum(tl.max(tl.abs(turned_low), 1), tl.max(tl.abs(turned_high), 1))
        poison = tl.sum((turned_low + turned_high) * 0.0, 1)
        scale, inverse = row_scale(largest, poison, LIMIT)
        beside = (page + BLOCK_SIZE * HEAD_DIM) // 4 + slot
        tl.store(key_scales + beside, scale, mask=are_keys)
        tl.store(value_scales + beside, scale, mask=are_values)
    where = (page + slot * HEAD_DIM)[:, None] + place[None, :]
    _store_half(keys, where, turned_low, inverse, inside & are_keys[:, None], LIMIT)
    _store_half(keys, where + HEAD_DIM // 2, turned_high, inverse, inside & are_keys[:, None], LIMIT)
    _store_half(values, where, turned_low, inverse, inside & are_values[:, None], LIMIT)
    _store_half(values, where + HEAD_DIM // 2, turned_high, inverse, inside & are_values[:, None], LIMIT)
