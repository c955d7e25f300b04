"""A decoder-only transformer that executes a ModelSpec."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.families import LayerSpec, ModelSpec
from penstock.kernels import Kernels
from penstock.models.rope import inverse_frequencies, rotation


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
class _Linear:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _Layer:
    """A layer's spec and its parameters, looked up once."""

    spec: LayerSpec
    attention_norm: Tensor
    qkv: _Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: q's weight for each query head, k's for each KV head
    output: _Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: _Linear
    down: _Linear
    mlp_post_norm: Tensor | None


class Decoder:
    """Parameters are those of `spec.parameters`, by name, all of one dtype: that of the activations as well."""

    def __init__(self, spec: ModelSpec, parameters: Mapping[str, Tensor], kernels: Kernels) -> None:
        self._spec = spec
        self._kernels = kernels
        self._embedding = parameters["embedding.weight"]
        self._norm = parameters["norm.weight"]
        self._head = self._embedding if spec.tie_embeddings else parameters["head.weight"]
        self._layers = tuple(_layer(layer, f"layers.{i}.", parameters) for i, layer in enumerate(spec.layers))
        self._frequencies = {
            (layer.rope, layer.head_dim): inverse_frequencies(layer.rope, layer.head_dim) for layer in spec.layers
        }
        self._activations = {"silu": kernels.silu_and_mul, "gelu_tanh": kernels.gelu_tanh_and_mul}

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Tensor:
        """Hidden states [tokens, hidden] of the last layer, before the final norm. Writes keys and values to `caches`,
        one per layer."""
        kernels, spec = self._kernels, self._spec
        eps, offset = spec.norm_eps, spec.norm_offset
        rotations = {
            key: rotation(frequencies, step.positions, self._embedding.dtype)
            for key, frequencies in self._frequencies.items()
        }
        residual = kernels.embedding(step.token_ids, self._embedding, spec.embedding_scale)
        addend: Tensor | None = None  # the last block's output, which joins the residual in the next norm
        for layer, cache in zip(self._layers, caches, strict=True):
            normed, residual = kernels.rms_norm(residual, addend, layer.attention_norm, eps, offset)
            cos, sin = rotations[(layer.spec.rope, layer.spec.head_dim)]
            addend = self._attend(layer, normed, cos, sin, step.groups[layer.spec.kv_group], cache)
            addend = self._post_norm(addend, layer.attention_post_norm)
            normed, residual = kernels.rms_norm(residual, addend, layer.mlp_norm, eps, offset)
            gate_up = kernels.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
            inner = self._activations[layer.spec.activation](gate_up)
            addend = kernels.linear(inner, layer.down.weight, layer.down.bias)
            addend = self._post_norm(addend, layer.mlp_post_norm)
        return residual if addend is None else residual + addend

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab] of rows that `forward` gave."""
        normed, _ = self._kernels.rms_norm(hidden, None, self._norm, self._spec.norm_eps, self._spec.norm_offset)
        return self._kernels.linear(normed, self._head, None).float()

    def _attend(
        self, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor, group: GroupInput, cache: LayerCache
    ) -> Tensor:
        kernels, spec = self._kernels, layer.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = kernels.linear(normed, layer.qkv.weight, layer.qkv.bias).view(-1, heads + 2 * kv_heads, spec.head_dim)
        qk = kernels.qk_norm_rope(
            qkv[:, : heads + kv_heads], layer.qk_norm, cos, sin, self._spec.norm_eps, self._spec.norm_offset
        )
        kernels.write_kv(
            cache.keys, cache.values, qk[:, heads:], qkv[:, heads + kv_heads :], group.blocks, group.offsets
        )
        attended = kernels.paged_attention(
            qk[:, :heads], cache.keys, cache.values, group.attention, spec.attention_scale
        )
        return kernels.linear(attended.view(-1, heads * spec.head_dim), layer.output.weight, layer.output.bias)

    def _post_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return self._kernels.rms_norm(x, None, weight, self._spec.norm_eps, self._spec.norm_offset)[0]


def _layer(spec: LayerSpec, prefix: str, parameters: Mapping[str, Tensor]) -> _Layer:
    def linear(name: str) -> _Linear:
        return _Linear(parameters[f"{prefix}{name}.weight"], parameters.get(f"{prefix}{name}.bias"))

    qk_norm = None
    if spec.qk_norm:
        q, k = (parameters[f"{prefix}{x}_norm.weight"] for x in "qk")
        qk_norm = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
    return _Layer(
        spec,
        parameters[f"{prefix}attention_norm.weight"],
        linear("qkv"),
        qk_norm,
        linear("output"),
        parameters.get(f"{prefix}attention_post_norm.weight"),
        parameters[f"{prefix}mlp_norm.weight"],
        linear("gate_up"),
        linear("down"),
        parameters.get(f"{prefix}mlp_post_norm.weight"),
    )
