"""Paged attention in torch: gather what is seen, then dense attention.

Sequences with one query are taken together, a few at a time so that what is gathered stays in cache. One with more
queries is taken alone, its queries in tiles, by torch's flash attention.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.attention import (
    AttentionBatch,
    PagedAttention,
    ReferenceAttention,
    TorchPages,
    attention_inputs,
    run_attention,
    run_store,
    store_inputs,
)
from penstock.kernels.flashinfer import DTYPES, FlashInferAttention, library, odd_heads
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.session import native_session
from penstock.kernels.registry import Needs, Op, Platform, Provider, has_fixed_triton, has_native, has_triton

DECODE_ELEMENTS = 1 << 20  # of keys gathered at once, and then as many values: 4 MiB in fp32, which stay in cache
QUERY_TILE = 256  # bounds the scores of a long prompt; a tile sees no further than its last query


@dataclass(frozen=True)
class _Part:
    """Decoding sequences, in order of their context's length, or some KV heads of one: what is gathered at once."""

    sequences: slice
    heads: slice
    index: Tensor  # rows of the pages' heads, [sequences * heads * blocks]
    mask: Tensor  # 0 or -inf, fp32 [sequences, 1, 1, blocks * block_size]


@dataclass(frozen=True)
class _Prompt:
    """A sequence with several queries: rows start to end of the step's tokens."""

    start: int
    end: int
    position: int  # of the first query
    origin: int  # position of the first key gathered
    index: Tensor  # [kv_heads * blocks]


@dataclass(frozen=True)
class _Prepared:
    window: int
    decode_rows: Tensor | None  # rows of the parts' sequences among the step's tokens; None: all rows, in order
    parts: tuple[_Part, ...]
    prompts: tuple[_Prompt, ...]


class GatheredAttention(TorchPages):
    """Owns the scratch it gathers into: fresh memory of that size would cost more page faults than the copy."""

    def __init__(self) -> None:
        self._gathered = torch.empty(0)
        self._wide = torch.empty(0)

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> _Prepared:
        layout = _Layout(batch, keys)
        query_lens = batch.query_lens
        decoding = np.flatnonzero(query_lens == 1)
        decoding = decoding[np.argsort(layout.spans[decoding], kind="stable")]
        parts = [part for start, end in _buckets(layout.spans[decoding]) for part in layout.parts(decoding, start, end)]
        rows = batch.query_start[:-1][decoding]
        prompts = tuple(layout.prompt(i) for i in np.flatnonzero(query_lens > 1).tolist())
        in_order = not prompts and bool((rows[1:] > rows[:-1]).all())
        decode_rows = None if in_order else torch.from_numpy(rows)
        return _Prepared(batch.window, decode_rows, tuple(parts), prompts)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, prepared: _Prepared, scale: float) -> Tensor:
        rows = prepared.decode_rows
        if rows is None:
            return self._decode(query, keys, values, prepared, scale)
        out = torch.empty(query.shape, dtype=query.dtype)
        for prompt in prepared.prompts:
            _prefill(query, keys, values, prompt, prepared.window, scale, out)
        if len(rows):
            out.index_copy_(0, rows, self._decode(query.index_select(0, rows), keys, values, prepared, scale))
        return out

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, prepared: _Prepared, scale: float) -> Tensor:
        """One query [sequences, heads, head_dim] per sequence, in fp32 whatever the pages hold."""
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        shape = (query.shape[0], kv_heads, query.shape[1] // kv_heads, head_dim)
        folded = query.float().reshape(shape)
        out = torch.empty(shape)
        for part in prepared.parts:
            q = folded[part.sequences, part.heads]
            pairs = q.shape[0] * q.shape[1]
            k = self._gather(keys, part.index).view(pairs, -1, head_dim)
            scores = torch.bmm(q.flatten(0, 1), k.transpose(1, 2)).view(*q.shape[:3], -1)
            weights = torch.add(part.mask, scores, alpha=scale).softmax(-1)
            v = self._gather(values, part.index).view(pairs, -1, head_dim)
            torch.bmm(weights.flatten(0, 1), v, out=out[part.sequences, part.heads].view(-1, *shape[2:]))
        return out.view(query.shape).to(query.dtype)

    def _gather(self, pages: Tensor, index: Tensor) -> Tensor:
        """Rows `index` of the pages' heads, fp32, in scratch that the next call overwrites."""
        width = pages.shape[2] * pages.shape[3]
        count = len(index) * width
        if self._wide.numel() < count or self._gathered.dtype != pages.dtype:
            self._wide = torch.empty(count)
            self._gathered = self._wide if pages.dtype == torch.float32 else torch.empty(count, dtype=pages.dtype)
        gathered, wide = (scratch[:count].view(-1, width) for scratch in (self._gathered, self._wide))
        torch.index_select(_head_rows(pages), 0, index, out=gathered)
        return wide if gathered.dtype == wide.dtype else wide.copy_(gathered)


def _prefill(
    query: Tensor, keys: Tensor, values: Tensor, prompt: _Prompt, window: int, scale: float, out: Tensor
) -> None:
    """Fill in the prompt's rows of `out`."""
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    k, v = (_head_rows(pages).index_select(0, prompt.index).view(1, kv_heads, -1, head_dim) for pages in (keys, values))
    for start in range(prompt.start, prompt.end, QUERY_TILE):
        end = min(start + QUERY_TILE, prompt.end)
        first = prompt.position + start - prompt.start
        query_at = torch.arange(first, first + end - start)[:, None]
        seen = max(first - window + 1, 0) - prompt.origin if window else 0
        past = first + end - start - prompt.origin
        key_at = torch.arange(prompt.origin + seen, prompt.origin + past)
        mask = key_at <= query_at
        if window:
            mask &= key_at > query_at - window
        result = F.scaled_dot_product_attention(
            query[start:end].transpose(0, 1).unsqueeze(0),
            k[:, :, seen:past],
            v[:, :, seen:past],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = result[0].transpose(0, 1)


def _head_rows(pages: Tensor) -> Tensor:
    """[rows, block_size * head_dim]: row block * (stride of a block) + head holds a block's tokens of one head."""
    blocks, kv_heads, size, head_dim = pages.shape
    width = size * head_dim
    return pages.as_strided(((blocks - 1) * (pages.stride(0) // width) + kv_heads, width), (width, 1))


class _Layout:
    """Where what a step's sequences see lies in the pages."""

    def __init__(self, batch: AttentionBatch, keys: Tensor) -> None:
        _, self.kv_heads, self.size, head_dim = keys.shape
        self.batch = batch
        self.width = self.size * head_dim
        self.rows_per_block = keys.stride(0) // self.width
        self.seen = batch.first_seen()
        self.first_block = self.seen // self.size
        self.spans = -(-batch.context_lens // self.size) - self.first_block  # blocks that a sequence's queries see

    def prompt(self, sequence: int) -> _Prompt:
        first, batch = int(self.first_block[sequence]), self.batch
        table = batch.block_tables[sequence, first : first + int(self.spans[sequence])]
        start, end = batch.query_start[sequence : sequence + 2].tolist()
        position = int(batch.context_lens[sequence]) - (end - start)
        index = self._rows(table[None])
        return _Prompt(start, end, position, first * self.size, torch.from_numpy(index.reshape(-1)))

    def parts(self, decoding: NDArray[np.int64], start: int, end: int) -> list[_Part]:
        """Divide sequences decoding[start:end], all padded to the span of the last, into parts of a bounded size."""
        sequences = decoding[start:end]
        span = int(self.spans[sequences[-1]])
        context, first_block = self.batch.context_lens[sequences, None], self.first_block[sequences, None]
        block = first_block + np.arange(span)
        used = block * self.size < context
        # Padding reads the null block, which is zero.
        table = np.where(used, self.batch.block_tables[sequences[:, None], np.where(used, block, 0)], 0)
        index = torch.from_numpy(self._rows(table))
        position = first_block * self.size + np.arange(span * self.size)
        visible = (position >= self.seen[sequences, None]) & (position < context)
        mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))[:, None, None]
        pairs = max(DECODE_ELEMENTS // (span * self.width), 1)  # of a sequence and a KV head
        count, heads = max(pairs // self.kv_heads, 1), min(pairs, self.kv_heads)
        return [
            _Part(
                slice(start + i, min(start + i + count, end)),
                slice(head, head + heads),
                index[i : i + count, head : head + heads].flatten(),
                mask[i : i + count],
            )
            for i in range(0, len(sequences), count)
            for head in range(0, self.kv_heads, heads)
        ]

    def _rows(self, tables: NDArray[np.int64]) -> NDArray[np.int64]:
        """[sequences, kv_heads, blocks] of `_head_rows` for block tables [sequences, blocks]."""
        return tables[:, None] * self.rows_per_block + np.arange(self.kv_heads)[:, None]


def _buckets(spans: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges of ascending `spans` that may be padded to their largest: it is little more than their smallest."""
    buckets = []
    start, values = 0, spans.tolist()
    for i, span in enumerate(values):
        if span > 1.25 * values[start] + 2:
            buckets.append((start, i))
            start = i
    return [*buckets, (start, len(values))] if values else []


def _on_cpu(platform: Platform, needs: Needs) -> bool:
    return platform.device == "cpu"


def _native(platform: Platform, needs: Needs) -> bool:
    whole_lines = needs.block_size % 16 == 0 and all(dim % 16 == 0 for dim in needs.head_dims)
    return has_native(platform, needs) and whole_lines


def _triton(*, fixed: bool = False) -> PagedAttention:
    from penstock.kernels.triton.attention import TritonAttention

    return TritonAttention(fixed=fixed)


def _flashinfer() -> PagedAttention:
    return FlashInferAttention(_triton(), library().BatchPrefillWithPagedKVCacheWrapper)


def _has_flashinfer(platform: Platform, needs: Needs) -> bool:
    asked = needs.attention == "flashinfer" and not needs.deterministic
    return asked and has_triton(platform, needs) and needs.dtype in DTYPES and not odd_heads(needs)


_PROVIDERS = (
    Provider("native", lambda: NativeAttention(native_session()), _native),
    Provider("gathered", GatheredAttention, _on_cpu),
    Provider("flashinfer", _flashinfer, _has_flashinfer),
    Provider("triton_fixed", partial(_triton, fixed=True), has_fixed_triton),
    Provider("triton", _triton, has_triton),
)
_TORCH = Provider("torch", ReferenceAttention, lambda platform, needs: True)
_SEVERAL_ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
PAGED_ATTENTION = Op("paged_attention", _TORCH, _SEVERAL_ROUNDINGS, attention_inputs, _PROVIDERS, run_attention)
# The same providers by their other method.
STORE_KV = Op("store_kv", _TORCH, _SEVERAL_ROUNDINGS, store_inputs, _PROVIDERS, run_store)
