"""Executes the kinds of attention: one class for each AttentionSpec of families/attention_kinds.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.families import GroupedQuerySpec, ModelSpec
from penstock.kernels import Kernels
from penstock.models.parameters import LayerParameters


@dataclass(frozen=True)
class GroupInput:
    """One step as a KV group sees it."""

    attention: Any  # what the attention kernel prepared: the sequences, their queries and their block tables
    blocks: Tensor  # int64 [tokens]: the block that each token is stored in,
    offsets: Tensor  # and its place in the block


@dataclass(frozen=True)
class LayerCache:
    """A layer's part of the pages of its KV group: one view [num_blocks, heads, rows, width] per plane of its
    PageShape."""

    planes: tuple[Tensor, ...]

    @property
    def keys(self) -> Tensor:
        return self.planes[0]

    @property
    def values(self) -> Tensor:
        return self.planes[1]


class Attention(Protocol):
    """The attention of one layer. The output projection is a step of its own: in the last layer it is computed for the
    sampled tokens only."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        ...

    @property
    def input_weight(self) -> Any | None:
        """The packed weight that alone multiplies the input of `attend`; None if there are several."""
        ...

    def attend(self, kernels: Kernels, x: Tensor, rotation: Any, group: GroupInput, cache: LayerCache) -> Tensor:
        """Normed hidden states [tokens, hidden] to [tokens, width]. Stores in the cache what the layer keeps of the
        tokens. `rotation` is the kernels' for the spec's `rotary`; None without one."""
        ...

    def project(self, kernels: Kernels, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        """Rows that `attend` gave to [rows, hidden], plus the residual."""
        ...


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Executes a GroupedQuerySpec."""

    spec: GroupedQuerySpec
    qkv: Any
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: q's weight for each query head, k's for each KV head
    output: Any
    norm_eps: float
    norm_offset: float

    @classmethod
    def make(cls, spec: GroupedQuerySpec, parameters: LayerParameters, model: ModelSpec) -> "GroupedQueryAttention":
        qk_norm = None
        if spec.qk_norm:
            q, k = parameters.vector("q_norm"), parameters.vector("k_norm")
            qk_norm = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        qkv, output = parameters.matrix("qkv"), parameters.matrix("output")
        return cls(spec, qkv, qk_norm, output, model.norm_eps, model.norm_offset)

    @property
    def nbytes(self) -> int:
        norm = 0 if self.qk_norm is None else self.qk_norm.nbytes
        return int(self.qkv.nbytes + norm + self.output.nbytes)

    @property
    def input_weight(self) -> Any:
        return self.qkv

    def attend(self, kernels: Kernels, x: Tensor, rotation: Any, group: GroupInput, cache: LayerCache) -> Tensor:
        keys, values = cache.planes
        query = kernels.attention.store(
            kernels.linear(x, self.qkv),
            self.spec.num_heads,
            self.qk_norm,
            rotation,
            keys,
            values,
            group.blocks,
            group.offsets,
            self.norm_eps,
            self.norm_offset,
        )
        attended = kernels.attention(query, keys, values, group.attention, self.spec.scale)
        return attended.view(-1, self.spec.query_width)

    def project(self, kernels: Kernels, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        return kernels.linear(attended, self.output, residual)


# The class of an AttentionSpec to what makes its Attention of (the spec, the layer's parameters, the model's spec).
AttentionKinds = Mapping[type, Callable[[Any, LayerParameters, ModelSpec], Attention]]

ATTENTION_KINDS: AttentionKinds = MappingProxyType({GroupedQuerySpec: GroupedQueryAttention.make})
