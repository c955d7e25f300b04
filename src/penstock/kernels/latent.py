"""Latent attention in torch (DeepSeek-AI, "DeepSeek-V2", 2024): all heads' keys and values are products of one small
vector a token, its latent, which alone is kept, beside one rotated key that the heads share.

The products are moved to the other side: a query is multiplied with its head's part of the keys' weight, and what a
head attends to with its part of the values'. So attention reads latents as they are, as keys and as values.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.attention import AttentionBatch, ReferenceAttention
from penstock.kernels.elementwise import qk_norm_rope


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

    def over_latents(self, query: Tensor, pages: Tensor, prepared: Any, scale: float, rank: int) -> Tensor:
        """Attention of these queries. A position's key is all of its row, its value the first `rank` elements. Returns
        [tokens, heads * rank]."""

    def arrange(self, pages: Tensor, *, keys: bool) -> Tensor:
        """Pages [..., block_size, rank + rope], a token in each row, converted to the provider's layout of keys."""


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
