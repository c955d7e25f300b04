"""Latent attention in torch (DeepSeek-AI, "DeepSeek-V2", 2024): all heads' keys and values are products of one small
vector a token, its latent, which alone is kept, beside one rotated key that the heads share.

The products are moved to the other side: a query is multiplied with its head's part of the keys' weight, and what a
head attends to with its part of the values'. So attention reads latents as they are, as keys and as values.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.attention import AttentionBatch, ReferenceAttention, attention_inputs, unscaled
from penstock.kernels.elementwise import qk_norm_rope
from penstock.kernels.registry import normals


class LatentAttention(Protocol):
    """A provider of attention over pages of latents, [blocks, 1, block_size, rank + rope]. `prepared` and `rotation`
    are those of the PagedAttention of the same platform."""

    def store_latents(
        self,
        absorbed: Tensor,
        rotated: Tensor,
        latent: Tensor,
        key: Tensor,
        rotation: Any,
        pages: Tensor,
        blocks: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """Rotate the heads' parts `rotated` [tokens, heads * rope] and the key [tokens, rope]. Store token i's latent
        [rank], then its key, at offset `offsets[i]` of block `blocks[i]`. Returns the queries [tokens, heads, rank +
        rope]: of each head its part of `absorbed` [tokens, heads * rank], then the rotated part."""
        ...

    def over_latents(self, query: Tensor, pages: Tensor, prepared: Any, scale: float, rank: int) -> Tensor:
        """Attention of these queries. A position's key is all of its row, its value the first `rank` elements. Returns
        [tokens, heads * rank]."""
        ...

    def arrange(self, pages: Tensor, *, keys: bool) -> Tensor:
        """Pages [..., block_size, rank + rope], a token in each row, converted to the provider's layout of keys."""
        ...


class ReferenceLatentAttention(ReferenceAttention):
    """Latent attention in torch and fp32."""

    def store_latents(
        self,
        absorbed: Tensor,
        rotated: Tensor,
        latent: Tensor,
        key: Tensor,
        rotation: tuple[Tensor, ...],
        pages: Tensor,
        blocks: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        parts = torch.cat((rotated, key), 1).unflatten(1, (-1, key.shape[1]))
        cos, sin = rotation
        turned = qk_norm_rope(parts, None, cos, sin, 0.0, 0.0)
        pages[blocks, 0, offsets] = torch.cat((latent, turned[:, -1]), 1)
        return torch.cat((absorbed.unflatten(1, (-1, latent.shape[1])), turned[:, :-1]), 2)

    def over_latents(self, query: Tensor, pages: Tensor, prepared: AttentionBatch, scale: float, rank: int) -> Tensor:
        return self(query, pages, pages, prepared, scale)[..., :rank].flatten(1)


def store_latents_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """Arguments of `store_latents`, with positions and frequencies instead of the rotation."""
    normal, generator = normals(dtype, seed), torch.Generator().manual_seed(seed)
    heads, rank, rope, size = 3, 32, 16, 16
    frequencies = unscaled(100.0 ** -torch.linspace(0, 1, rope // 2))
    for tokens in (0, 1, 7, 70):
        pages = torch.zeros(9, 3, 1, size, rank + rope, dtype=dtype)[:, 1]
        slots = torch.randperm(9 * size, generator=generator)[:tokens]
        positions = torch.randint(5000, (tokens,), generator=generator)
        parts = normal(tokens, heads * rank), normal(tokens, heads * rope), normal(tokens, rank), normal(tokens, rope)
        yield *parts, (positions, frequencies), pages, slots // size, slots % size


def latent_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """(query, pages, batch, scale, rank): sequences of all lengths, over one head of pages."""
    for rank, rope in ((32, 16), (144, 64)):
        for query, keys, _, batch, scale, softcap, sinks in attention_inputs(dtype, seed, rank + rope):
            if not softcap and sinks is None:  # all queries' heads meet the first of the keys'
                yield query, keys[:, :1].contiguous(), batch, scale, rank


def run_store_latents(attention: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(queries, pages). Pages come back with a token in each row."""
    *parts, (positions, frequencies), pages, blocks, offsets = arguments
    pages = pages.clone()
    rotation = attention.rotation(positions, frequencies, pages.dtype)
    query = attention.store_latents(*parts, rotation, pages, blocks, offsets)
    numbers = torch.arange(pages[0, 0].numel(), dtype=torch.int32 if pages.itemsize == 4 else torch.int16)
    place = attention.arrange(numbers.view(pages.shape[-2:]), keys=True).flatten().argsort()
    return query, pages.flatten(-2)[..., place].view(pages.shape)


def run_latent(attention: Any, arguments: tuple[Any, ...]) -> Tensor:
    query, pages, batch, scale, rank = arguments
    pages = attention.arrange(pages, keys=True)
    prepared = attention.prepare(batch, pages)
    result: Tensor = attention.over_latents(query.contiguous(), pages, prepared, scale, rank)
    return result
