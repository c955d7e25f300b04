"""Attention by the native kernels, over pages in the layout that their products read (see CacheOp in cpp/ops.h)."""

from ctypes import addressof, c_int64

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.facts import QueryTemperature
from penstock.kernels.attention import AttentionBatch, HeadNorm
from penstock.kernels.native.linear import DTYPES
from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import I8, AttentionOp, CacheOp, LatentOp, RotationOp
from penstock.messages import Window

SEGMENT = 512  # kSegment in cpp/ops.h
PAGE_DTYPES = {**DTYPES, torch.int8: I8}
TILE_QUERIES = 32  # queries of an item of work; each gives a row for every head that shares a KV head
BOTH_WAYS_QUERIES = 64  # the same, without a causal mask, whose tiles would compute more scores that are not seen
PARTIALS = 1024  # segments whose results can be stored for merging; further sequences are one item each


class AttentionWork:
    """A step's items of work for one KV group. Sized for the largest step, so that every step can fill it again."""

    def __init__(self, sequences: int, tokens: int, blocks: int, window: Window, *, causal: bool = True) -> None:
        self.window, self.causal = window, causal
        self._tile = TILE_QUERIES if causal else BOTH_WAYS_QUERIES
        self.item_count, self.merge_count = c_int64(), c_int64()
        self.items = np.zeros((tokens + PARTIALS, 5), np.int32)
        self.merges = np.zeros((sequences, 3), np.int32)
        self.query_start = np.zeros(sequences + 1, np.int64)
        self.context_lens = np.zeros(sequences, np.int64)
        self.tables = np.zeros((sequences, blocks), np.int64)
        self._divided: tuple[bytes, ...] = ()  # the arguments of the last _divide

    def fill(self, batch: AttentionBatch) -> None:
        sequences, blocks = batch.block_tables.shape
        self.query_start[: sequences + 1] = batch.query_start
        self.context_lens[:sequences] = batch.context_lens
        self.tables[:sequences, :blocks] = batch.block_tables
        if not self.causal:  # every query has all segments to itself
            self.item_count.value = self._put_whole(np.arange(sequences), batch.context_lens)
            return
        first_segment = batch.first_seen() // SEGMENT
        segments = -(-batch.context_lens // SEGMENT) - first_segment
        # The same for hundreds of steps while sequences decode.
        divided = (batch.query_start.tobytes(), first_segment.tobytes(), segments.tobytes())
        if divided != self._divided:
            self._divide(batch.query_lens, first_segment, segments)
            self._divided = divided

    def steps_unchanged(self) -> int:
        """For how many more decode steps the items of work stay right; 0 if unknown."""
        sequences = len(self._divided[0]) // 8 - 1
        context = self.context_lens[:sequences]
        left = -context % SEGMENT  # until a context enters another segment,
        if self.window:  # or the window leaves one, or the next chunk begins
            tokens = self.window.tokens
            left = np.minimum(left, -context % tokens if self.window.chunked else (tokens - 1 - context) % SEGMENT)
        return int(left.min())

    def _divide(
        self, lengths: NDArray[np.int64], first_segment: NDArray[np.int64], segments: NDArray[np.int64]
    ) -> None:
        """Make the items of work from these arguments alone."""
        split = (lengths == 1) & (segments > 1)
        split &= np.cumsum(np.where(split, segments, 0)) <= PARTIALS
        whole, parts = np.flatnonzero(~split), np.flatnonzero(split)
        count = self._put_whole(whole, lengths)
        if len(parts):
            divided = _items(parts, segments[parts])
            more = len(divided)
            divided[:, 3] = divided[:, 1] + first_segment[divided[:, 0]]
            divided[:, 1], divided[:, 2] = 0, 1
            divided[:, 4] = np.arange(more)
            self.items[count : count + more] = divided
            count += more
            merges = self.merges[: len(parts)]
            merges[:, 0], merges[:, 2] = parts, segments[parts]
            merges[:, 1] = np.cumsum(segments[parts]) - segments[parts]
        self.item_count.value, self.merge_count.value = count, len(parts)

    def _put_whole(self, sequences: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """Puts the items of these sequences first, each over all segments. Returns how many there are."""
        items = _items(sequences, -(-lengths[sequences] // self._tile))
        items[:, 1] *= self._tile
        items[:, 2] = np.minimum(lengths[items[:, 0]] - items[:, 1], self._tile)
        items[:, 3] = -1
        self.items[: len(items)] = items
        return len(items)


def _items(sequences: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows (sequence, i, 0, 0, 0) for i from 0 to the sequence's count."""
    rows = np.zeros((int(counts.sum()), 5), np.int64)
    rows[:, 0] = sequences.repeat(counts)
    rows[:, 1] = np.arange(len(rows)) - (np.cumsum(counts) - counts).repeat(counts)
    return rows


class NativeAttention:
    """Provides PagedAttention (see kernels/attention.py)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._partials = torch.empty(0)

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> AttentionWork:
        sequences, blocks = batch.block_tables.shape
        prepared = AttentionWork(sequences, int(batch.query_start[-1]), blocks, batch.window, causal=batch.causal)
        prepared.fill(batch)
        return prepared

    def rotation(
        self,
        positions: Tensor,
        frequencies: Tensor,
        dtype: torch.dtype,
        temperature: QueryTemperature | None = None,
    ) -> Tensor:
        """fp32 [tokens, 2, half]: cosines and sines; with a temperature [tokens, 4, half]: then those of queries."""
        half, queries = frequencies.shape[1], temperature or QueryTemperature(0, 0.0)
        out = self._session.empty(positions, 2 if temperature is None else 4, half, dtype=torch.float32)
        op = RotationOp(
            self._session.rows(positions),
            positions.data_ptr(),
            frequencies.data_ptr(),
            out.data_ptr(),
            half,
            queries.every,
            queries.first,
            queries.scale,
        )
        self._session.run(op, frequencies)
        return out

    def store(
        self,
        qkv: Tensor,
        heads: int,
        weight: Tensor | None,
        rotation: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        eps: float,
        offset: float,
        *,
        norm: HeadNorm = "heads",
        queries_only: bool = False,
    ) -> Tensor:
        _, kv_heads, block_size, _ = keys.shape
        kv_heads = 0 if queries_only else kv_heads
        head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
        query = self._session.empty(qkv, heads, head_dim, dtype=qkv.dtype)
        op = CacheOp(
            self._session.rows(qkv),
            qkv.data_ptr(),
            None if weight is None else weight.data_ptr(),
            rotation.data_ptr(),
            blocks.data_ptr(),
            offsets.data_ptr(),
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            heads,
            kv_heads,
            head_dim,
            block_size,
            keys.stride(0),
            keys.stride(1),
            rotation.shape[1] * rotation.shape[2],
            (rotation.shape[1] - 2) * rotation.shape[2],
            eps,
            offset,
            weight is not None and norm == "whole",
            weight is not None and norm == "centered",
            weight is not None and len(weight) > heads + kv_heads,
            DTYPES[qkv.dtype],
            PAGE_DTYPES[keys.dtype],
        )
        self._session.run(op, weight, keys, values)
        return query

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        prepared: AttentionWork,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._attend(query, keys, values, prepared, scale, query.shape[2], softcap, sinks)

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor | None,
        prepared: AttentionWork,
        scale: float,
        value_dim: int,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Without `values`, the first `value_dim` elements of a key are its value."""
        _, kv_heads, block_size, _ = keys.shape
        _, heads, head_dim = query.shape
        out = self._session.empty(query, heads, value_dim, dtype=query.dtype)
        needed = PARTIALS * heads * (value_dim + 2)
        if self._partials.numel() < needed:
            self._partials = torch.empty(needed)
        op = AttentionOp(
            addressof(prepared.item_count),
            addressof(prepared.merge_count),
            prepared.items.ctypes.data,
            prepared.merges.ctypes.data,
            prepared.query_start.ctypes.data,
            prepared.context_lens.ctypes.data,
            prepared.tables.ctypes.data,
            prepared.tables.shape[1],
            query.data_ptr(),
            keys.data_ptr(),
            None if values is None else values.data_ptr(),
            out.data_ptr(),
            self._partials.data_ptr(),
            heads,
            kv_heads,
            head_dim,
            value_dim,
            block_size,
            keys.stride(0),
            keys.stride(1),
            prepared.window.tokens,
            scale,
            softcap,
            None if sinks is None else sinks.data_ptr(),
            DTYPES[query.dtype],
            PAGE_DTYPES[keys.dtype],
            not prepared.causal,
            prepared.window.chunked,
        )
        self._session.run(op, prepared, self._partials, sinks, keys, values)
        return out

    def arrange(self, pages: Tensor, *, keys: bool) -> Tensor:
        per_word = 4 // pages.itemsize
        rows = pages.transpose(-1, -2) if keys else pages
        words = rows.reshape(*rows.shape[:-2], -1, per_word, rows.shape[-1])
        return words.transpose(-1, -2).reshape(pages.shape).contiguous()


class NativeLatentAttention(NativeAttention):
    """Provides LatentAttention (see kernels/latent.py). A latent and its key lie in a page as a key does."""

    def store_latents(
        self,
        absorbed: Tensor,
        rotated: Tensor,
        latent: Tensor,
        key: Tensor,
        rotation: Tensor,
        pages: Tensor,
        blocks: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        rank, rope = latent.shape[1], key.shape[1]
        heads = rotated.shape[1] // rope
        query = self._session.empty(latent, heads, rank + rope, dtype=latent.dtype)
        op = LatentOp(
            self._session.rows(latent),
            absorbed.data_ptr(),
            rotated.data_ptr(),
            latent.data_ptr(),
            key.data_ptr(),
            rotation.data_ptr(),
            blocks.data_ptr(),
            offsets.data_ptr(),
            query.data_ptr(),
            pages.data_ptr(),
            heads,
            rank,
            rope,
            pages.shape[2],
            pages.stride(0),
            DTYPES[latent.dtype],
        )
        self._session.run(op, pages)
        return query

    def over_latents(self, query: Tensor, pages: Tensor, prepared: AttentionWork, scale: float, rank: int) -> Tensor:
        return self._attend(query, pages, None, prepared, scale, rank).view(-1, query.shape[1] * rank)
