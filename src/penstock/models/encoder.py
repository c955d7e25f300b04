"""Implements the encoder that a ModelSpec describes: hidden states of whole texts, and one vector for each text.

The texts of a step lie one after the other, without padding. Only attention sees where they begin.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.families import ModelSpec
from penstock.families.encoders.shared import BidirectionalSpec
from penstock.kernels import AttentionBatch, Kernels
from penstock.kernels.attention import unscaled
from penstock.kernels.linear import ACTIVATIONS as GATED
from penstock.kernels.linear import UNGATED
from penstock.messages import Window
from penstock.models.norm import Norm
from penstock.models.parameters import LayerParameters
from penstock.models.pooling import finished, pool
from penstock.models.product import Product
from penstock.models.rope import rotary_frequencies

BLOCK = 16  # tokens of a page

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({**UNGATED, "tanh": torch.tanh})


@dataclass(frozen=True)
class Texts:
    token_ids: Tensor  # int64 [tokens], one text after the other
    lengths: Sequence[int]
    second: Sequence[int]  # for each text: where the second text of a pair begins, or its length


@dataclass(frozen=True)
class _Layer:
    attention: BidirectionalSpec
    qkv: Product
    output: Product
    attention_norm: Norm | None
    up: Product
    down: Product
    mlp_norm: Norm


@dataclass(frozen=True)
class LayerInput:
    """The inputs of a step that layers read beside the hidden states."""

    positions: Tensor  # int64 [tokens], as are the next two: each token's place in its text,
    blocks: Tensor  # the block that holds its key and value,
    offsets: Tensor  # and the place in the block
    attention: Mapping[int, Any]  # what attention prepared, by reach
    keys: Tensor  # [blocks, heads, BLOCK, head_dim]: those of one layer after the other
    values: Tensor


@dataclass(frozen=True)
class TextLayout:
    """The places of the texts' tokens, and of their keys and values, which live as long as the step. A text begins with
    a block of its own. Arrays are int64."""

    lengths: NDArray[np.int64]  # [texts]
    starts: NDArray[np.int64]  # [texts + 1]: their first tokens, and the end of the last one
    first_blocks: NDArray[np.int64]  # [texts]
    positions: NDArray[np.int64]  # [tokens]
    blocks: NDArray[np.int64]  # [tokens]
    offsets: NDArray[np.int64]  # [tokens]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "TextLayout":
        sizes = np.array(lengths, np.int64)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        each = -(-sizes // BLOCK)
        first_blocks = np.cumsum(each) - each
        positions = np.arange(starts[-1]) - starts[:-1].repeat(sizes)
        blocks = first_blocks.repeat(sizes) + positions // BLOCK
        return cls(sizes, starts, first_blocks, positions, blocks, positions % BLOCK)

    def part(self, first: int, end: int) -> "TextLayout":
        """Those of some texts alone."""
        tokens, block = slice(self.starts[first], self.starts[end]), self.first_blocks[first]
        return TextLayout(
            self.lengths[first:end],
            self.starts[first : end + 1] - self.starts[first],
            self.first_blocks[first:end] - block,
            self.positions[tokens],
            self.blocks[tokens] - block,
            self.offsets[tokens],
        )

    @property
    def num_blocks(self) -> int:
        return int(self.blocks[-1]) + 1

    def batch(self, reach: int) -> AttentionBatch:
        """Returns the input of attention, if a token sees `reach` tokens on either side, or with 0 the whole text."""
        most = -(-int(self.lengths.max()) // BLOCK)
        tables: NDArray[np.int64] = self.first_blocks[:, None] + np.arange(most)
        return AttentionBatch(BLOCK, window_of(reach), self.starts, self.lengths, tables, causal=False)


def window_of(reach: int) -> Window:
    """The window of an AttentionBatch in which a token sees `reach` tokens on either side."""
    return Window(reach + 1 if reach else 0)


class Encoder:
    """Executes a spec with an EncoderSpec. `parameters` maps the spec's names to tensors; matrices of layers are taken
    out and packed for the kernels."""

    def __init__(self, spec: ModelSpec, parameters: MutableMapping[str, Tensor], kernels: Kernels) -> None:
        assert spec.encoder is not None and spec.pooling is not None, "the spec is an encoder's"
        self._spec, self._encoder, self._pooling = spec, spec.encoder, spec.pooling
        self._parameters = parameters
        self._kernels = kernels
        self._activation = spec.encoder.activation
        self._embedding_norm = self._norm("embedding_norm")
        prefixed = [LayerParameters(parameters, f"layers.{i}.", kernels) for i in range(len(spec.layers))]
        self._layers = [
            _Layer(
                layer.attention,  # type: ignore[arg-type]
                own.matrix("qkv"),
                own.matrix("output"),
                self._norm(f"{own.prefix}attention_norm"),
                own.matrix("up", gated=self._encoder.gated and self.recordable),
                own.matrix("down"),
                self._norm(f"{own.prefix}mlp_norm"),  # type: ignore[arg-type]
            )
            for layer, own in zip(spec.layers, prefixed, strict=True)
        ]
        self._last_norm = self._norm("norm")
        self._tables = {name: parameters.get(f"{name}.weight") for name in ("tokens", "positions", "types")}
        self._frequencies = {layer.attention.rotary: _frequencies(layer.attention) for layer in self._layers}

    @property
    def nbytes(self) -> int:
        packed = sum(each.nbytes for layer in self._layers for each in (layer.qkv, layer.output, layer.up, layer.down))
        return int(packed + sum(tensor.nbytes for tensor in self._parameters.values()))

    @property
    def reaches(self) -> set[int]:
        """How far tokens see in the layers; 0: the whole text."""
        return {layer.attention.reach for layer in self._layers}

    @property
    def recordable(self) -> bool:
        """Whether `layers` consists of ops of the kernels alone: the product before an activation computes it."""
        return self._activation in (GATED if self._encoder.gated else UNGATED)

    def pages(self, blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns memory for the keys and values of a layer."""
        spec = self._layers[0].attention
        keys, values = torch.empty(2, blocks, spec.num_heads, BLOCK, spec.head_dim, dtype=dtype)
        return keys, values

    def forward(self, texts: Texts) -> Tensor:
        """Returns the hidden states [tokens, hidden]."""
        layout = TextLayout.of(texts.lengths)
        x = self.embed(texts, layout)
        keys, values = self.pages(layout.num_blocks, x.dtype)
        attention = {reach: self._kernels.attention.prepare(layout.batch(reach), keys) for reach in self.reaches}
        positions, blocks, offsets = map(torch.from_numpy, (layout.positions, layout.blocks, layout.offsets))
        return self.layers(x, LayerInput(positions, blocks, offsets, attention, keys, values))

    def layers(self, x: Tensor, step: LayerInput) -> Tensor:
        """Returns the hidden states [tokens, hidden] after all layers, for those that `embed` returned."""
        rotations = {
            rotary: self._kernels.attention.rotation(step.positions, of, x.dtype)
            for rotary, of in self._frequencies.items()
        }
        for layer in self._layers:
            rotation = rotations[layer.attention.rotary]
            x = (self._first_norms if self._encoder.norm_first else self._last_norms)(layer, x, step, rotation)
        return x if self._last_norm is None else self._last_norm(self._kernels, x)[0]

    def pool(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns fp32 [texts, width]: embeddings, or a classifier's logits."""
        pooled = pool(hidden, lengths, self._pooling.mode)
        if self._encoder.classifier is not None:
            return self._classify(pooled.to(hidden.dtype)).float()
        return finished(pooled, self._pooling)

    def _last_norms(self, layer: _Layer, x: Tensor, step: LayerInput, rotation: Any) -> Tensor:
        assert layer.attention_norm is not None
        x = layer.attention_norm(self._kernels, self._attend(layer, x, step, rotation, x))[0]
        normed: Tensor = layer.mlp_norm(self._kernels, self._mlp(layer, x, x))[0]
        return normed

    def _first_norms(self, layer: _Layer, x: Tensor, step: LayerInput, rotation: Any) -> Tensor:
        normed = x if layer.attention_norm is None else layer.attention_norm(self._kernels, x)[0]
        x = self._attend(layer, normed, step, rotation, x)
        return self._mlp(layer, layer.mlp_norm(self._kernels, x)[0], x)

    def _attend(self, layer: _Layer, x: Tensor, step: LayerInput, rotation: Any, residual: Tensor) -> Tensor:
        spec, kernels = layer.attention, self._kernels
        cache = step.keys, step.values
        query = kernels.attention.store(
            layer.qkv(x),
            spec.num_heads,
            None,
            rotation,
            *cache,
            step.blocks,
            step.offsets,
            0.0,
            0.0,
        )
        out = kernels.attention(query, *cache, step.attention[spec.reach], spec.head_dim**-0.5)
        return layer.output(out.flatten(1), residual)

    def _mlp(self, layer: _Layer, x: Tensor, residual: Tensor) -> Tensor:
        if self.recordable:
            return layer.down(layer.up.activated(x, self._activation), residual)
        activate, up = ACTIVATIONS[self._activation], layer.up(x)
        if not self._encoder.gated:
            return layer.down(activate(up), residual)
        first, second = up.chunk(2, -1)
        return layer.down(activate(first) * second, residual)

    def embed(self, texts: Texts, layout: TextLayout) -> Tensor:
        """Returns the hidden states [tokens, hidden] before the first layer."""
        tokens, positions, types = (self._tables[name] for name in ("tokens", "positions", "types"))
        assert tokens is not None
        x = F.embedding(texts.token_ids, tokens)
        if types is not None:
            alone = not self._encoder.segments or list(texts.second) == list(texts.lengths)
            x += types[0] if alone else types[_segments(texts)]
        if positions is not None:
            x += positions[torch.from_numpy(layout.positions) + self._encoder.first_position]
        return x if self._embedding_norm is None else self._embedding_norm(self._kernels, x)[0]

    def _classify(self, pooled: Tensor) -> Tensor:
        assert self._encoder.classifier is not None
        get = self._parameters.get
        dense = F.linear(pooled, self._parameters["classifier.dense.weight"], get("classifier.dense.bias"))
        norm = self._norm("classifier.norm")
        x = ACTIVATIONS[self._encoder.classifier](dense)
        x = x if norm is None else norm(self._kernels, x)[0]
        return F.linear(x, self._parameters["classifier.out.weight"], get("classifier.out.bias"))

    def _norm(self, name: str) -> Norm | None:
        weight = self._parameters.get(f"{name}.weight")
        if weight is None:
            return None
        return Norm(weight, self._parameters.get(f"{name}.bias"), self._spec.norm_eps, offset=0.0, centered=True)


def _frequencies(spec: BidirectionalSpec) -> Tensor:
    if spec.rotary is None:
        return unscaled(torch.zeros(spec.head_dim // 2))
    return rotary_frequencies(*spec.rotary, context=0)


def _segments(texts: Texts) -> Tensor:
    """1 for the tokens of a pair's second text, else 0."""
    each = zip(texts.lengths, texts.second, strict=True)
    return torch.cat([(torch.arange(length) >= second).long() for length, second in each])
