"""Implements the kinds of attention: one class for each AttentionSpec of families/kinds/attention.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.families import GroupedQuerySpec, LatentSpec, ModelSpec, RecurrentSpec
from penstock.kernels import Kernels
from penstock.models.latent import LatentLayer
from penstock.models.parameters import LayerParameters
from penstock.models.product import Product
from penstock.models.recurrence import RecurrentLayer


@dataclass(frozen=True)
class GroupInput:
    """Holds what attention reads of a step in the layers of one KV group, or in those with a state."""

    # Prepared by the attention kernel: the sequences, their queries and their block tables. For layers with a state
    # the units of the step, int32 [sequences, UNIT_LINES].
    attention: Any
    blocks: Tensor  # int64 [tokens]: the block that each token is stored in,
    offsets: Tensor  # and its place in the block


@dataclass(frozen=True)
class LayerCache:
    """Holds one layer's part of the pages of its KV group: a view [num_blocks, heads, rows, width] for each plane of
    the PageShape. Grouped-query attention has two: keys and values. A layer with a state has one: float32 [rows of the
    batch, width]."""

    planes: tuple[Tensor, ...]

    @property
    def keys(self) -> Tensor:
        return self.planes[0]

    @property
    def values(self) -> Tensor:
        return self.planes[1]


class Attention(Protocol):
    """Computes the attention of one layer. The output projection is a method of its own, because in the last layer it
    is computed for the sampled tokens only."""

    @property
    def nbytes(self) -> int: ...

    @property
    def input_product(self) -> Product | None:
        """Returns the product that reads the input of `attend`, or None if several do."""

    def attend(self, kernels: Kernels, x: Tensor, rotation: Any, group: GroupInput, cache: LayerCache) -> Tensor:
        """Returns the output of attention [tokens, width] for normed hidden states x [tokens, hidden]. Writes to
        `cache` what later tokens need, such as keys and values. `rotation` is what the kernels' `rotation` returned, or
        None without rotary."""

    def project(self, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the output projection [rows, hidden] of rows that `attend` returned, plus the residual if given."""


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Executes a GroupedQuerySpec."""

    spec: GroupedQuerySpec
    qkv: Product
    # [heads + kv_heads, head_dim]: q's weight for each query head, k's for each KV head; with a norm of values ones too
    qk_norm: Tensor | None
    sinks: Tensor | None  # fp32 [heads]
    gate: Product | None
    output: Product
    residual_scale: float
    norm_eps: float
    norm_offset: float

    @classmethod
    def make(cls, spec: GroupedQuerySpec, parameters: LayerParameters, model: ModelSpec) -> "GroupedQueryAttention":
        qk_norm = None
        if spec.qk_norm == "unit":
            qk_norm = parameters.ones(spec.num_heads + spec.num_kv_heads, spec.head_dim)
        elif spec.qk_norm and spec.kv_layer is not None:
            qk_norm = parameters.vector("q_norm").repeat(spec.num_heads).view(-1, spec.head_dim)
        elif spec.qk_norm:
            q, k = parameters.vector("q_norm"), parameters.vector("k_norm")
            if spec.qk_norm == "heads":
                q, k = q.repeat(spec.num_heads), k.repeat(spec.num_kv_heads)
            qk_norm = torch.cat((q, k)).view(-1, spec.head_dim)
        if spec.value_norm and qk_norm is not None and spec.kv_layer is None:
            qk_norm = torch.cat((qk_norm, parameters.ones(spec.num_kv_heads, spec.head_dim)))
        sinks = parameters.vector("sinks").float() if spec.sinks else None
        qkv, output = parameters.matrix("qkv"), parameters.matrix("output")
        scale = model.residual_scale
        gate = parameters.matrix("gate", label="attention_gate") if spec.gate else None
        return cls(spec, qkv, qk_norm, sinks, gate, output, scale, model.norm_eps, model.norm_offset)

    @property
    def nbytes(self) -> int:
        others = (self.qk_norm, self.sinks, self.gate)
        return int(self.qkv.nbytes + self.output.nbytes + sum(each.nbytes for each in others if each is not None))

    @property
    def input_product(self) -> Product | None:
        return self.qkv if self.gate is None else None

    def attend(self, kernels: Kernels, x: Tensor, rotation: Any, group: GroupInput, cache: LayerCache) -> Tensor:
        keys, values = cache.planes
        query = kernels.attention.store(
            self.qkv(x),
            self.spec.num_heads,
            self.qk_norm,
            rotation,
            keys,
            values,
            group.blocks,
            group.offsets,
            self.norm_eps,
            self.norm_offset,
            norm=self.spec.qk_norm if self.spec.qk_norm in ("whole", "centered") else "heads",
            queries_only=self.spec.kv_layer is not None,
        )
        attended = kernels.attention(
            query, keys, values, group.attention, self.spec.scale, softcap=self.spec.softcap, sinks=self.sinks
        )
        attended = attended.view(-1, self.spec.query_width)
        return attended if self.gate is None else kernels.sigmoid_gate(attended, self.gate(x))

    def project(self, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.output(attended, residual, scale=self.residual_scale)


# Maps the type of an AttentionSpec to a function (spec, the layer's parameters, the model's spec) -> Attention.
AttentionKinds = Mapping[type, Callable[[Any, LayerParameters, ModelSpec], Attention]]

ATTENTION_KINDS: AttentionKinds = MappingProxyType(
    {GroupedQuerySpec: GroupedQueryAttention.make, LatentSpec: LatentLayer.make, RecurrentSpec: RecurrentLayer.make}
)
