"""A decoder-only transformer that executes a ModelSpec."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from penstock.families import LayerSpec, ModelSpec
from penstock.kernels import Kernels, Linear
from penstock.models.rope import inverse_frequencies


@dataclass(frozen=True)
class GroupInput:
    """One step as a KV group sees it."""

    attention: Any  # what the attention kernel prepared
    blocks: Tensor  # int64 [tokens]: the block each token's key and value go to,
    offsets: Tensor  # and where in it


@dataclass(frozen=True)
class StepInput:
    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    groups: tuple[GroupInput, ...]  # one per KV group of the spec


@dataclass(frozen=True)
class LayerCache:
    """A layer's part of the pages: views [num_blocks, kv_heads, block_size, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class _Layer:
    """A layer's spec and its parameters, the matrices as the kernels packed them."""

    spec: LayerSpec
    attention_norm: Tensor
    qkv: Any
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: q's weight for each query head, k's for each KV head
    output: Any
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    down: Any
    mlp_post_norm: Tensor | None


class Decoder:
    """Executes a spec. `parameters` are those of `spec.parameters`, by name: the vectors' dtype is that of the
    activations as well, and matrices are of it too, or packed by `select_packing` of the kernels' platform. They are
    taken out of the mapping one by one and packed where they are not: nothing is in memory twice."""

    def __init__(self, spec: ModelSpec, parameters: MutableMapping[str, Any], kernels: Kernels) -> None:
        self._spec = spec
        self._kernels = kernels
        self._dtype = parameters["norm.weight"].dtype
        self._embedding = kernels.linear.pack(parameters.pop("embedding.weight"))
        self._norm = parameters.pop("norm.weight")
        tied = spec.tie_embeddings
        self._head = self._embedding if tied else kernels.linear.pack(parameters.pop("head.weight"))
        self._layers = tuple(
            _layer(layer, f"layers.{i}.", parameters, kernels.linear) for i, layer in enumerate(spec.layers)
        )
        self._frequencies = {
            (layer.rope, layer.head_dim): inverse_frequencies(layer.rope, layer.head_dim) for layer in spec.layers
        }

    @property
    def nbytes(self) -> int:
        """Of all weights; a tied one counts once."""
        tensors: list[Any] = [self._embedding, self._norm]
        if self._head is not self._embedding:
            tensors.append(self._head)
        for layer in self._layers:
            tensors += [getattr(layer, field.name) for field in fields(layer) if field.name != "spec"]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Tensor:
        """Hidden states [tokens, hidden] of the last layer, before the final norm. Writes keys and values to `caches`,
        one per layer."""
        kernels, spec = self._kernels, self._spec
        linear, eps, offset = kernels.linear, spec.norm_eps, spec.norm_offset
        rotations = {
            key: kernels.attention.rotation(step.positions, frequencies, self._dtype)
            for key, frequencies in self._frequencies.items()
        }
        hidden = linear.rows(step.token_ids, self._embedding, spec.embedding_scale, self._dtype)
        addend: Tensor | None = None  # the last block's output where a norm follows it: joins in the next block's norm
        for layer, cache in zip(self._layers, caches, strict=True):
            normed, hidden = kernels.rms_norm(hidden, addend, layer.attention_norm, eps, offset)
            qkv = linear(normed, layer.qkv)
            rotation = rotations[(layer.spec.rope, layer.spec.head_dim)]
            attended = self._attend(layer, qkv, rotation, step.groups[layer.spec.kv_group], cache)
            hidden, addend = self._project(attended, layer.output, layer.attention_post_norm, hidden)
            normed, hidden = kernels.rms_norm(hidden, addend, layer.mlp_norm, eps, offset)
            inner = linear.gated(normed, layer.gate_up, layer.spec.activation)
            hidden, addend = self._project(inner, layer.down, layer.mlp_post_norm, hidden)
        return hidden if addend is None else kernels.rms_norm(hidden, addend, self._norm, eps, offset)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab] of rows that `forward` gave."""
        normed, _ = self._kernels.rms_norm(hidden, None, self._norm, self._spec.norm_eps, self._spec.norm_offset)
        return self._kernels.linear.logits(normed, self._head)

    def _attend(self, layer: _Layer, qkv: Tensor, rotation: Any, group: GroupInput, cache: LayerCache) -> Tensor:
        attention, spec = self._kernels.attention, layer.spec
        query = attention.store(
            qkv,
            spec.num_heads,
            layer.qk_norm,
            rotation,
            cache.keys,
            cache.values,
            group.blocks,
            group.offsets,
            self._spec.norm_eps,
            self._spec.norm_offset,
        )
        attended = attention(query, cache.keys, cache.values, group.attention, spec.attention_scale)
        return attended.view(-1, spec.num_heads * spec.head_dim)

    def _project(
        self, x: Tensor, weight: Any, post_norm: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A block's end: (hidden states, what is still to be added to them)."""
        if post_norm is None:
            return self._kernels.linear(x, weight, hidden), None
        output = self._kernels.linear(x, weight)
        return hidden, self._kernels.rms_norm(output, None, post_norm, self._spec.norm_eps, self._spec.norm_offset)[0]


def _layer(spec: LayerSpec, prefix: str, parameters: MutableMapping[str, Any], linear: Linear) -> _Layer:
    def packed(name: str, *, gated: bool = False) -> Any:
        weight = parameters.pop(f"{prefix}{name}.weight")
        return linear.pack(weight, parameters.pop(f"{prefix}{name}.bias", None), gated=gated)

    def norm(name: str) -> Tensor | None:
        return parameters.pop(f"{prefix}{name}.weight", None)

    qk_norm = None
    if spec.qk_norm:
        q, k = (parameters.pop(f"{prefix}{x}_norm.weight") for x in "qk")
        qk_norm = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
    return _Layer(
        spec,
        parameters.pop(f"{prefix}attention_norm.weight"),
        packed("qkv"),
        qk_norm,
        packed("output"),
        norm("attention_post_norm"),
        parameters.pop(f"{prefix}mlp_norm.weight"),
        packed("gate_up", gated=True),
        packed("down"),
        norm("mlp_post_norm"),
    )
