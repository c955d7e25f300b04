"""A decoder-only transformer that executes a ModelSpec."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.families import LayerSpec, ModelSpec
from penstock.kernels import Kernels
from penstock.models.collectives import Collectives
from penstock.models.mlp import MLP, Mixture, pack_mlp
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
    hidden: Tensor | None = None  # [tokens, hidden], what the stage before gave, for a stage without the embedding


@dataclass(frozen=True)
class LayerCache:
    """A layer's part of the pages: views [num_blocks, kv_heads, block_size, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Hidden:
    """What `forward` gives of a step's tokens, or of some of them.

    Where the head is, the last layer is left off after its attention, which has written all keys and values by then:
    the rest, a fiftieth of a prompt's work, is done by `logits` for those tokens alone that are asked for."""

    states: Tensor  # [tokens, hidden]
    attended: Tensor | None = None  # [tokens, heads * head_dim], what that attention gave, where the head is

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice | Tensor) -> "Hidden":
        return self.mapped(lambda tensor: tensor[rows])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Hidden":
        """A function of both."""
        return Hidden(function(self.states), None if self.attended is None else function(self.attended))

    @property
    def latest(self) -> Tensor:
        """What was computed last: NaN or infinite in a token's row if one of its keys or values is."""
        return self.states if self.attended is None else self.attended


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
    mlp: MLP | Mixture
    mlp_post_norm: Tensor | None


class Decoder:
    """Executes a spec. `parameters` are those of `spec.parameters`, by name: the vectors' dtype is that of the
    activations as well, and matrices are of it too, or packed by `select_packing` of the kernels' platform. They are
    taken out of the mapping one by one and packed where they are not: nothing is in memory twice.

    The spec may be a rank's (see families/shard.py): where it shares its layers with others, `collectives` adds what
    each computes; a stage of several takes hidden states where it has no embedding, and without a norm and a head its
    hidden states are all it gives."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: MutableMapping[str, Any],
        kernels: Kernels,
        collectives: Collectives | None = None,
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._collectives = collectives
        vector = parameters["layers.0.attention_norm.weight"]
        self._dtype, device = vector.dtype, vector.device

        def packed(name: str) -> Any:
            return kernels.linear.pack(parameters.pop(name)) if name in parameters else None

        self._embedding = packed("embedding.weight")
        self._norm = parameters.pop("norm.weight", None)
        self._head = self._embedding if spec.tie_embeddings else packed("head.weight")
        self._layers = tuple(_layer(layer, f"layers.{i}.", parameters, kernels) for i, layer in enumerate(spec.layers))
        self._frequencies = {
            (layer.rope, layer.head_dim): inverse_frequencies(layer.rope, layer.head_dim).to(device)
            for layer in spec.layers
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

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Hidden:
        """All layers here, the rest of the last excepted where the head is. Writes keys and values to `caches`, one per
        layer."""
        kernels = self._kernels
        rotations = {
            key: kernels.attention.rotation(step.positions, frequencies, self._dtype)
            for key, frequencies in self._frequencies.items()
        }
        hidden = self._embed(step)
        addend: Tensor | None = None  # the last block's output where a norm follows it: joins in the next block's norm
        for layer, cache in zip(self._layers, caches, strict=True):
            rotation = rotations[(layer.spec.rope, layer.spec.head_dim)]
            group = step.groups[layer.spec.kv_group]
            hidden, attended = self._attend(layer, hidden, addend, rotation, group, cache)
            if self._norm is not None and layer is self._layers[-1]:
                return Hidden(hidden, attended)
            hidden, addend = self._finish(layer, attended, hidden)
        # For the sum alone: any norm's weight will do.
        eps, offset = self._spec.norm_eps, self._spec.norm_offset
        return Hidden(hidden if addend is None else kernels.rms_norm(hidden, addend, layer.mlp_norm, eps, offset)[1])

    def logits(self, hidden: Hidden) -> Tensor | None:
        """fp32 [rows, vocab] of rows that `forward` gave; None on ranks that have but helped another to them."""
        spec = self._spec
        states, addend = self._finish(self._layers[-1], hidden.attended, hidden.states)
        norm = self._kernels.norm_before(self._head)
        normed, _ = norm(states, addend, self._norm, spec.norm_eps, spec.norm_offset)
        logits = self._kernels.linear.logits(normed, self._head)
        return logits if self._collectives is None else self._collectives.gather(logits, spec.vocab_total)

    def _embed(self, step: StepInput) -> Tensor:
        if step.hidden is not None:
            return step.hidden
        spec, linear, collectives = self._spec, self._kernels.linear, self._collectives
        if collectives is None:
            return linear.rows(step.token_ids, self._embedding, spec.embedding_scale, self._dtype)
        part = linear.rows(step.token_ids, self._embedding, spec.embedding_scale, self._dtype, first=spec.vocab_start)
        collectives.sum(part)
        return part

    def _attend(
        self,
        layer: _Layer,
        hidden: Tensor,
        addend: Tensor | None,
        rotation: Any,
        group: GroupInput,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """A layer's part up to attention: (hidden states with the addend, what attention gave)."""
        kernels, attention, spec = self._kernels, self._kernels.attention, layer.spec
        norm = kernels.norm_before(layer.qkv)
        normed, hidden = norm(hidden, addend, layer.attention_norm, self._spec.norm_eps, self._spec.norm_offset)
        query = attention.store(
            kernels.linear(normed, layer.qkv),
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
        return hidden, attended.view(-1, spec.num_heads * spec.head_dim)

    def _finish(self, layer: _Layer, attended: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """A layer's part after attention: (hidden states, what is still to be added to them)."""
        kernels, eps, offset = self._kernels, self._spec.norm_eps, self._spec.norm_offset
        output = partial(kernels.linear, attended, layer.output)
        hidden, addend = self._join(output, layer.attention_post_norm, hidden)
        norm = kernels.norm_before(layer.mlp.only_reader)
        normed, hidden = norm(hidden, addend, layer.mlp_norm, eps, offset)
        return self._join(partial(layer.mlp, kernels, normed), layer.mlp_post_norm, hidden)

    def _join(
        self, block: Callable[[Tensor | None], Tensor], post_norm: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A block's end, which takes a residual: (hidden states, what is still to be added to them)."""
        if post_norm is None and self._collectives is None:
            return block(hidden), None
        output, spec = block(None), self._spec
        if self._collectives is not None:
            self._collectives.sum(output)
        if post_norm is None:
            return hidden, output
        return hidden, self._kernels.rms_norm(output, None, post_norm, spec.norm_eps, spec.norm_offset)[0]


def _layer(spec: LayerSpec, prefix: str, parameters: MutableMapping[str, Any], kernels: Kernels) -> _Layer:
    def packed(name: str) -> Any:
        weight = parameters.pop(f"{prefix}{name}.weight")
        return kernels.linear.pack(weight, parameters.pop(f"{prefix}{name}.bias", None))

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
        pack_mlp(spec, prefix, parameters, kernels),
        norm("mlp_post_norm"),
    )
