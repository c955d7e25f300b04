"""Attention over a paged KV cache, and the writing of new keys and values into it.

A layer's keys and values are views [num_blocks, kv_heads, block_size, head_dim] into the pages of its KV group. Decode,
prefill and a chunk of it are one case: the queries of a sequence are its last tokens, and their own keys are read back
from the cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.registry import EXACT, Op, reference


@dataclass(frozen=True)
class AttentionBatch:
    """One step as a KV group sees it: which tokens query, and where what they see lies. Arrays are on the host.

    Sequence i's queries are rows query_start[i] to query_start[i + 1] of the step's tokens, the last ones of its
    context_lens[i] tokens. Its block table row holds the ids of blocks 0, 1, ...; entries before the window of the
    first query, or past the context, mean nothing. Block 0 of the pages is zero.
    """

    block_size: int
    window: int  # tokens a query sees, itself included; 0: all
    query_start: NDArray[np.int64]  # [sequences + 1]
    context_lens: NDArray[np.int64]  # [sequences], queries included
    block_tables: NDArray[np.int64]  # [sequences, at least the most blocks of any]

    @property
    def query_lens(self) -> NDArray[np.int64]:
        return np.diff(self.query_start)

    def first_seen(self) -> NDArray[np.int64]:
        """The first position that the first query of each sequence sees."""
        first = self.context_lens - self.query_lens
        return np.maximum(first - self.window + 1, 0) if self.window else np.zeros_like(first)


class PagedAttention(Protocol):
    """A provider of attention. What depends on the step alone is prepared once and used by all layers of the group."""

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> Any:
        """`keys` of any layer of the group gives their shape and strides."""
        ...

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, prepared: Any, scale: float) -> Tensor:
        """Queries [tokens, heads, head_dim] in, the same shape and dtype out. Consecutive heads share a KV head."""
        ...


def write_kv(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Store k and v [tokens, kv_heads, head_dim] at offset `offsets[i]` of block `blocks[i]`, all distinct."""
    keys[blocks, :, offsets] = k
    values[blocks, :, offsets] = v


class ReferenceAttention:
    """One sequence after the other, in fp32."""

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> AttentionBatch:
        return batch

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, prepared: AttentionBatch, scale: float) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        size = prepared.block_size
        for i, context in enumerate(prepared.context_lens.tolist()):
            start, end = prepared.query_start[i : i + 2].tolist()
            first = int(prepared.first_seen()[i]) // size
            table = torch.from_numpy(prepared.block_tables[i, first : -(-context // size)])
            key_at = torch.arange(first * size, context)
            query_at = torch.arange(context - (end - start), context)[:, None]
            visible = key_at <= query_at
            if prepared.window:
                visible &= key_at > query_at - prepared.window
            # [blocks, kv_heads, block_size, head_dim] to [heads, context, head_dim]
            k, v = (
                pages[table]
                .transpose(1, 2)
                .flatten(0, 1)[: len(key_at)]
                .float()
                .transpose(0, 1)
                .repeat_interleave(query.shape[1] // keys.shape[1], 0)
                for pages in (keys, values)
            )
            scores = query[start:end].float().transpose(0, 1) @ k.transpose(1, 2) * scale
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[start:end] = (weights @ v).transpose(0, 1).to(out.dtype)
        return out


def attention_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """(query, keys, values, batch, scale): lengths mixed, blocks scattered, and garbage where nobody may look."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    size, head_dim = 4, 24
    for kv_heads, groups, window, lens in (
        (2, 2, 0, [(1, 1)]),
        (2, 3, 0, [(1, 17), (5, 5), (1, 4), (9, 40), (1, 33), (1, 8)]),
        (1, 4, 6, [(1, 30), (13, 29), (1, 6), (7, 7), (1, 3)]),
        (3, 1, 0, [(300, 301), (1, 200)]),
        (2, 2, 33, [(290, 300), (1, 200), (1, 1)]),
        (2, 2, 0, []),
    ):
        query_lens, context_lens = np.array(lens, np.int64).reshape(-1, 2).T
        widest = max((-(-context // size) for _, context in lens), default=0)
        num_blocks = 1 + len(lens) * widest
        tables = 1 + rng.permutation(num_blocks - 1).reshape(len(lens), widest)
        tokens = int(query_lens.sum())
        heads = torch.randn((tokens, kv_heads * (groups + 1), head_dim), generator=generator).to(dtype)
        query = heads[:, : kv_heads * groups]  # as it is sliced from a fused projection
        pages = torch.randn((num_blocks, 2, kv_heads, size, head_dim), generator=generator).to(dtype)
        pages[0] = 0.0
        start = np.concatenate([[0], np.cumsum(query_lens)])
        batch = AttentionBatch(size, window, start, context_lens, tables)
        yield query, pages[:, 0], pages[:, 1], batch, head_dim**-0.5


def _write_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(seed)
    for tokens in (0, 1, 7, 30):
        pages = torch.zeros(9, 3, 2, 2, 4, 24, dtype=dtype)
        slots = torch.randperm(36, generator=generator)[:tokens]
        k, v = torch.randn((2, tokens, 2, 24), generator=generator).to(dtype)
        yield pages[:, 1, 0], pages[:, 1, 1], k, v, slots // 4, slots % 4


def _run_write(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    keys, values, *rest = arguments
    keys, values = keys.clone(), values.clone()
    function(keys, values, *rest)
    return keys, values


WRITE_KV = Op("write_kv", reference(write_kv), EXACT, _write_inputs, run=_run_write)
