"""Attention over a paged KV cache, and the writing of new keys and values into it.

A layer's keys and values are views [num_blocks, kv_heads, block_size, head_dim] into the pages of its KV group. Decode,
prefill and a chunk of prefill are one case: the queries of a sequence are its last tokens, and their keys are read back
from the cache.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.facts import QueryTemperature
from penstock.kernels.elementwise import capped, normed, normed_centered, normed_together, qk_norm_rope
from penstock.messages import Window

HeadNorm = Literal["heads", "whole", "centered"]


@dataclass(frozen=True)
class AttentionBatch:
    """One step of a KV group: the queries and the block tables of its sequences. Arrays are on the host.

    Sequence i's queries are rows query_start[i] to query_start[i + 1] of the step's tokens, the last ones of its
    context_lens[i] tokens. Its row of the block table holds the ids of blocks 0, 1, ...; entries before the window of
    the first query, or past the context, are undefined. Block 0 of the pages is zero.
    """

    block_size: int
    window: Window
    query_start: NDArray[np.int64]  # [sequences + 1]
    context_lens: NDArray[np.int64]  # [sequences], queries included
    block_tables: NDArray[np.int64]  # [sequences, at least the most blocks of any]
    # False, only on a CPU and without chunks: a query also sees later tokens, within the window on that side too
    causal: bool = True

    @property
    def query_lens(self) -> NDArray[np.int64]:
        return np.diff(self.query_start)

    def first_seen(self) -> NDArray[np.int64]:
        """The first position that the first query of each sequence sees."""
        return self.window.first_seen(self.context_lens - self.query_lens)


class PagedAttention(Protocol):
    """A provider of attention and of the KV cache. Work that depends on the step alone is done once, by `prepare`, and
    its result serves all layers of the group."""

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> Any:
        """Prepare a step. `keys` are those of any layer of the group: only their shape and strides are used."""

    def rotation(
        self,
        positions: Tensor,
        frequencies: Tensor,
        dtype: torch.dtype,
        temperature: QueryTemperature | None = None,
    ) -> Any:
        """The rotations that `store` applies, for int64 positions [tokens] and fp32 frequencies [2, head_dim / 2]:
        radians per position, and what cosine and sine are multiplied by. Those of queries are also multiplied by their
        temperature."""

    def store(
        self,
        qkv: Tensor,
        heads: int,
        weight: Tensor | None,
        rotation: Any,
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
        """Norm (with a weight [heads + kv_heads, head_dim]) and rotate the query and key heads of qkv
        [tokens, (heads + 2 kv_heads) * head_dim]. The norm "whole" norms all query heads together, and all key heads;
        "centered" is LayerNorm of each head. A weight [heads + 2 kv_heads, head_dim], of the norm "heads" alone, norms
        the values' heads too. Store token i's key and value at offset `offsets[i]` of block `blocks[i]`; all places are
        distinct. Returns the queries [tokens, heads, head_dim]. The layout within a page is the provider's. With
        `queries_only` qkv and the weight have query heads alone, and nothing is stored."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        prepared: Any,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries [tokens, heads, head_dim]; same shape and dtype out. Consecutive heads share a KV
        head. `softcap` bounds scores with a tanh (0: not). `sinks`: fp32 [heads], the score of a further position whose
        value is zero and which all queries see."""

    def arrange(self, pages: Tensor, *, keys: bool) -> Tensor:
        """Pages [..., block_size, head_dim], a token in each row, converted to the provider's layout."""


def unscaled(radians: Tensor) -> Tensor:
    """The frequencies of `rotation` for radians per position [head_dim / 2]: cosines and sines stay as they are."""
    return torch.stack((radians, torch.ones_like(radians)))


class TorchPages:
    """Pages that hold a token's key or value in a row, written by torch."""

    def rotation(
        self,
        positions: Tensor,
        frequencies: Tensor,
        dtype: torch.dtype,
        temperature: QueryTemperature | None = None,
    ) -> tuple[Tensor, ...]:
        """(cos, sin) [tokens, 1, head_dim] for qk_norm_rope: the first half of sin is negated. With a temperature also
        what queries are multiplied by, fp32 [tokens, 1, 1]."""
        angles = positions.float()[:, None, None] * frequencies[0]
        sin = angles.sin() * frequencies[1]
        cos = angles.cos() * frequencies[1]
        turns = torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
        if temperature is None:
            return turns
        passed = (positions + temperature.first) // temperature.every
        return *turns, 1 + temperature.scale * passed.float().log1p()[:, None, None]

    def store(
        self,
        qkv: Tensor,
        heads: int,
        weight: Tensor | None,
        rotation: tuple[Tensor, ...],
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
        _, kv_heads, _, head_dim = keys.shape
        cos, sin, *temperature = rotation
        if queries_only:
            query = qk_norm_rope(qkv.view(-1, heads, head_dim), weight, cos, sin, eps, offset)
            return _tempered(query, *temperature)
        split = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        if weight is not None and norm == "whole":
            split, weight = normed_together(split, heads, kv_heads, weight, eps, offset), None
        elif weight is not None and norm == "centered":
            split, weight = normed_centered(split, heads, kv_heads, weight, eps), None
        value = split[:, heads + kv_heads :]
        if weight is not None and len(weight) > heads + kv_heads:
            weight, of_values = weight.split((heads + kv_heads, kv_heads))
            value = normed(value, of_values, eps, offset)
        qk = qk_norm_rope(split[:, : heads + kv_heads], weight, cos, sin, eps, offset)
        keys[blocks, :, offsets] = qk[:, heads:]
        values[blocks, :, offsets] = value
        return _tempered(qk[:, :heads], *temperature)

    def arrange(self, pages: Tensor, *, keys: bool) -> Tensor:
        return pages


def _tempered(query: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Queries [tokens, heads, head_dim] times factors [tokens, 1, 1], if given."""
    return query if temperature is None else (query.float() * temperature).to(query.dtype)


class ReferenceAttention(TorchPages):
    """Attention in torch and fp32, one sequence after the other."""

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> AttentionBatch:
        return batch

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        prepared: AttentionBatch,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out, size = torch.empty(query.shape, dtype=query.dtype), prepared.block_size
        first_seen = prepared.window.first_seen
        first_blocks = prepared.first_seen() // size
        for i, (first, context) in enumerate(zip(first_blocks.tolist(), prepared.context_lens.tolist(), strict=True)):
            start, end = prepared.query_start[i : i + 2].tolist()
            table = torch.from_numpy(prepared.block_tables[i, first : -(-context // size)])
            key_at = torch.arange(first * size, context)
            query_at = torch.arange(context - (end - start), context)[:, None]
            ahead = 1 if prepared.causal else prepared.window.tokens or context
            visible = (key_at < query_at + ahead) & (key_at >= torch.from_numpy(first_seen(query_at.numpy())))
            # [blocks, kv_heads, block_size, head_dim] to [1, kv_heads, keys, head_dim]
            k, v = (
                pages[table].transpose(0, 1).flatten(1, 2)[None, :, : len(key_at)].float() for pages in (keys, values)
            )
            q = query[None, start:end].transpose(1, 2).float()
            if softcap or sinks is not None:
                result = _weighed(q, k, v, visible, scale, softcap, sinks)
            else:
                result = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
            out[start:end] = result[0].transpose(0, 1)
        return out


def _weighed(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention [1, heads, queries, head_dim] with bounded scores and sinks."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = capped(scores, softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
