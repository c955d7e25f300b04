"""Paged attention on a GPU: contexts are divided among programs while few sequences decode, queries otherwise.

A tile has a row for each of its queries and each head that shares the KV head. Grids depend on the numbers of sequences
and tokens but not on contexts, which are read on the device: so a captured graph serves all contexts.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from torch import Tensor

from penstock.config.facts import QueryTemperature
from penstock.kernels.attention import AttentionBatch, HeadNorm
from penstock.kernels.batch_arrays import StepSequences, order_units
from penstock.kernels.elementwise import normed_centered, normed_together
from penstock.kernels.triton.attention_kernels import attend, merge
from penstock.kernels.triton.overlap import overlap
from penstock.kernels.triton.store import rotation, store
from penstock.kernels.triton.tiles import precision

SEGMENTS = 16  # parts of a decoding sequence's context, while sequences are too few to fill the GPU:
SPLIT_BELOW = 128  # up to so many pairs of a sequence and a KV head
MIN_ROWS = 16  # of a tile: tensor cores multiply this many at once
MAX_ROWS = 128
MAX_KEYS = 128  # per iteration; half as many where the registers or the bytes in flight would be too many
PAIR_ROWS = 64  # tensor cores take the values of tiles of fewer rows from registers, those of others from shared memory
FIXED_ROWS = 64  # of every tile when bits must not depend on the rest of the step
WARP_BYTES = 4096  # of a tile's queries: the result then takes 64 registers per thread, or 32 for fp32
# Stages of loads in flight: a block table's entry must arrive before its keys can be loaded.
DECODE_STAGES = 5
PREFILL_STAGES = 3
LOG2_E = 1.4426950408889634


class TritonAttention:
    """Provides PagedAttention (see kernels/attention.py). Pages hold a token's key or value in a row. In fp8 a head's
    part of a block is followed by the scales of its tokens."""

    def __init__(self, *, fixed: bool = False) -> None:
        """With `fixed`, the bits of a query's result depend only on its own context, in a chunk of any length: all
        queries are computed as a prompt's, in tiles of one shape, each over all keys from the first one seen."""
        self._fixed = fixed

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> StepSequences:
        lengths, count = batch.query_lens, len(batch.context_lens)
        sequences, decodes = order_units(lengths, batch.query_start[:-1], batch.context_lens, np.arange(count))
        # One copy: each would be a call to the driver.
        flat = np.concatenate([sequences.ravel(), batch.block_tables.astype(np.int32).ravel()])
        staged = torch.from_numpy(flat)
        if keys.is_cuda:
            staged = staged.pin_memory().to(keys.device, non_blocking=True)
        several = lengths[lengths > 1]
        return StepSequences(
            batch.window,
            staged[: sequences.size].view(sequences.shape),
            staged[sequences.size :].view(batch.block_tables.shape),
            decodes,
            count - decodes,
            int(several.sum()),
            int(several.max(initial=0)),
        )

    def rotation(
        self,
        positions: Tensor,
        frequencies: Tensor,
        dtype: torch.dtype,
        temperature: QueryTemperature | None = None,
    ) -> Tensor:
        return rotation(positions, frequencies, temperature)

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
        if weight is not None and norm != "heads":
            kv_heads = keys.shape[1]
            split = qkv.view(len(qkv), heads + 2 * kv_heads, qkv.shape[1] // (heads + 2 * kv_heads))
            if norm == "whole":
                split = normed_together(split, heads, kv_heads, weight, eps, offset)
            else:
                split = normed_centered(split, heads, kv_heads, weight, eps)
            qkv, weight = split.flatten(1), None
        kv_heads = 0 if queries_only else keys.shape[1]
        return store(qkv, heads, kv_heads, weight, rotation, keys, values, blocks, offsets, eps, offset)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        prepared: StepSequences,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        scores = Scores(scale, softcap, sinks)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if prepared.decodes and self._fixed:
            # In their columns of `sequences` the number of queries before them is 0, as a fixed launch needs it.
            ones = replace(prepared, decodes=0, prompts=prepared.decodes, prompt_queries=0)
            _prefill(query, keys, values, ones, scores, out, fixed=True)
        elif prepared.decodes:
            _decode(query, keys, values, prepared, scores, out)
        if prepared.prompts:
            _prefill(query, keys, values, prepared, scores, out, fixed=self._fixed)
        return out

    def arrange(self, pages: Tensor, *, keys: bool) -> Tensor:
        return pages


@dataclass(frozen=True)
class Scores:
    """How scores are made from products of queries and keys (see PagedAttention)."""

    scale: float
    softcap: float
    sinks: Tensor | None


def _decode(query: Tensor, keys: Tensor, values: Tensor, prepared: StepSequences, scores: Scores, out: Tensor) -> None:
    """Fill in the rows of the sequences of one query."""
    count, heads, head_dim = prepared.decodes, query.shape[1], query.shape[2]
    segments = SEGMENTS if count <= SPLIT_BELOW // keys.shape[1] else 1
    partial = sums = None
    if segments > 1:
        partial = torch.empty(count, heads, segments, head_dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(2, count, heads, segments, dtype=torch.float32, device=query.device)
    rows = max(triton.next_power_of_2(heads // keys.shape[1]), MIN_ROWS)
    shape = TileShape(True, count, 1, segments, rows)
    _attend(query, keys, values, prepared, scores, out, (partial, sums), shape)
    if segments > 1:
        merge[(count, heads)](
            partial,
            sums,
            prepared.units,
            out,
            scores.sinks,
            count,
            heads,
            HEAD_DIM=head_dim,
            SEGMENTS=segments,
            SINKS=scores.sinks is not None,
            WIDTH=_width(head_dim),
            num_warps=4,
            **overlap(),
        )


def _prefill(
    query: Tensor, keys: Tensor, values: Tensor, prepared: StepSequences, scores: Scores, out: Tensor, *, fixed: bool
) -> None:
    """Compute the rows of sequences with several queries."""
    group = query.shape[1] // keys.shape[1]
    most = MAX_ROWS // _times(query)
    if fixed:
        rows = max(FIXED_ROWS, triton.next_power_of_2(group))
    else:
        rows = min(
            max(triton.next_power_of_2(prepared.longest * group), MIN_ROWS), max(most, triton.next_power_of_2(group))
        )
    tiles = prepared.prompt_queries // (rows // group) + prepared.prompts
    _attend(query, keys, values, prepared, scores, out, (None, None), TileShape(False, tiles, rows // group, 1, rows))


@dataclass(frozen=True)
class TileShape:
    """The tiles of a launch."""

    decode: bool  # a tile is a sequence with one query; else some queries of a sequence with several
    tiles: int
    queries: int  # per tile
    segments: int
    rows: int  # per tile: queries times heads that share a KV head, padded


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prepared: StepSequences,
    scores: Scores,
    out: Tensor,
    parts: tuple[Tensor | None, Tensor | None],
    shape: TileShape,
) -> None:
    _, kv_heads, block_size, _ = keys.shape
    _, heads, head_dim = query.shape
    scaled = keys.dtype != query.dtype
    pairs = scaled and shape.rows < PAIR_ROWS
    width, times = _width(head_dim), _times(query)
    warps = 4 if shape.rows * width * query.itemsize <= WARP_BYTES * 4 else 8
    attend[(shape.tiles, kv_heads, shape.segments)](
        query,
        keys,
        values.view(torch.int16) if pairs else values,
        keys.view(torch.float32) if scaled else None,
        values.view(torch.float32) if scaled else None,
        out,
        scores.sinks,
        *parts,
        prepared.units,
        prepared.tables,
        prepared.units.shape[1],
        prepared.decodes,
        prepared.prompts,
        query.stride(0),
        prepared.tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        scores.scale * LOG2_E,
        scores.softcap * LOG2_E,
        heads,
        WINDOW=prepared.window.tokens,
        CHUNKED=prepared.window.chunked,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        DECODE=shape.decode,
        QUERIES=shape.queries,
        SEGMENTS=shape.segments,
        SCALED=scaled,
        SOFTCAP=scores.softcap != 0.0,
        SINKS=scores.sinks is not None,
        PAIRS=pairs,
        PRECISION=precision(query.dtype),
        ROWS=shape.rows,
        KEYS=(MAX_KEYS if pairs or (shape.rows >= MAX_ROWS and warps == 8) else MAX_KEYS // 2) // times,
        WIDTH=width,
        num_warps=warps,
        num_stages=DECODE_STAGES if shape.decode else PREFILL_STAGES,
        **overlap(),
    )


def _times(query: Tensor) -> int:
    """The bytes of a head as a multiple of 256, at least 1. Tiles are made smaller by this factor."""
    return max(_width(query.shape[2]) * query.itemsize // 256, 1)


def _width(head_dim: int) -> int:
    """The padded width of a head."""
    return max(1 << (head_dim - 1).bit_length(), 16)
