"""Implements the encoder that a ModelSpec describes: hidden states of whole texts, and one vector for each text.

The texts of a step lie one after the other, without padding. Only attention sees where they begin.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.families import ModelSpec
from penstock.families.encoder import BidirectionalSpec
from penstock.kernels.prepacked import ACTIVATIONS, ActivatedLinear
from penstock.models.pooling import finished, pool
from penstock.models.rope import inverse_frequencies

_QUERIES = 256  # of a text that attend at once, where each sees only near tokens


@dataclass(frozen=True)
class Texts:
    """The texts of a step, in an order in which texts of equal length are neighbours."""

    token_ids: Tensor  # int64 [tokens], one text after the other
    lengths: Sequence[int]
    second: Sequence[int]  # for each text: where the second text of a pair begins, or its length

    def runs(self) -> Iterator[tuple[slice, int, int]]:
        """(tokens, texts, length) of neighbours of equal length."""
        begin = 0
        for length, equal in groupby(self.lengths):
            count = sum(1 for _ in equal)
            yield slice(begin, begin + count * length), count, length
            begin += count * length


@dataclass(frozen=True)
class LayerNorm:
    """Computes torch's LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class _Layer:
    attention: BidirectionalSpec
    qkv: Any
    output: Any
    attention_norm: LayerNorm | None
    up: Any
    down: Any
    mlp_norm: LayerNorm


class Encoder:
    """Executes a spec with an EncoderSpec. `parameters` maps the spec's names to tensors; matrices of layers are taken
    out and packed for `linear`."""

    def __init__(self, spec: ModelSpec, parameters: MutableMapping[str, Tensor], linear: ActivatedLinear) -> None:
        assert spec.encoder is not None and spec.pooling is not None, "the spec is an encoder's"
        self._spec, self._encoder, self._pooling = spec, spec.encoder, spec.pooling
        self._parameters = parameters
        self._linear = linear
        self._activation = spec.encoder.activation
        self._embedding_norm = self._norm("embedding_norm")
        self._layers = [
            _Layer(
                layer.attention,  # type: ignore[arg-type]
                self._matrix(f"layers.{i}.qkv"),
                self._matrix(f"layers.{i}.output"),
                self._norm(f"layers.{i}.attention_norm"),
                self._matrix(f"layers.{i}.up"),
                self._matrix(f"layers.{i}.down"),
                self._norm(f"layers.{i}.mlp_norm"),  # type: ignore[arg-type]
            )
            for i, layer in enumerate(spec.layers)
        ]
        self._last_norm = self._norm("norm")
        self._tables = {name: parameters.get(f"{name}.weight") for name in ("tokens", "positions", "types")}
        self._frequencies = {
            layer.attention.rotary: inverse_frequencies(*layer.attention.rotary)
            for layer in spec.layers
            if layer.attention.rotary
        }

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all weights."""
        packed = sum(each.nbytes for layer in self._layers for each in (layer.qkv, layer.output, layer.up, layer.down))
        return int(packed + sum(tensor.nbytes for tensor in self._parameters.values()))

    def forward(self, texts: Texts) -> Tensor:
        """Returns the hidden states [tokens, hidden]."""
        x = self._embed(texts)
        rotations = {rotary: self._rotation(texts, of, x.dtype) for rotary, of in self._frequencies.items()}
        for layer in self._layers:
            rotation = rotations.get(layer.attention.rotary)  # type: ignore[arg-type]
            x = (self._first_norms if self._encoder.norm_first else self._last_norms)(layer, x, texts, rotation)
        return x if self._last_norm is None else self._last_norm(x)

    def pool(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns fp32 [texts, width]: embeddings, or a classifier's logits."""
        pooled = pool(hidden, lengths, self._pooling.mode)
        if self._encoder.classifier is not None:
            return self._classify(pooled.to(hidden.dtype)).float()
        return finished(pooled, self._pooling)

    def _last_norms(self, layer: _Layer, x: Tensor, texts: Texts, rotation: Any) -> Tensor:
        assert layer.attention_norm is not None
        x = layer.attention_norm(self._attend(layer, x, texts, rotation, x))
        return layer.mlp_norm(self._mlp(layer, x, x))

    def _first_norms(self, layer: _Layer, x: Tensor, texts: Texts, rotation: Any) -> Tensor:
        normed = x if layer.attention_norm is None else layer.attention_norm(x)
        x = self._attend(layer, normed, texts, rotation, x)
        return self._mlp(layer, layer.mlp_norm(x), x)

    def _attend(self, layer: _Layer, x: Tensor, texts: Texts, rotation: Any, residual: Tensor) -> Tensor:
        spec = layer.attention
        qkv = self._linear(x, layer.qkv).view(len(x), 3, spec.num_heads, spec.head_dim)
        if rotation is not None:
            qkv[:, :2] = _rotate(qkv[:, :2], *rotation)
        out = torch.empty(len(x), spec.num_heads, spec.head_dim, dtype=x.dtype)
        for where, count, length in texts.runs():
            q, k, v = qkv[where].view(count, length, 3, spec.num_heads, spec.head_dim).permute(2, 0, 3, 1, 4)
            into = out[where].view(count, length, spec.num_heads, spec.head_dim)
            if spec.reach and length > spec.reach + 1:
                _attend_near(q, k, v, spec.reach, into)
            else:
                into.copy_(F.scaled_dot_product_attention(q, k, v).transpose(1, 2))
        return self._linear(out.view(len(x), -1), layer.output, residual)

    def _mlp(self, layer: _Layer, x: Tensor, residual: Tensor) -> Tensor:
        if self._encoder.gated:
            up = self._linear(x, layer.up)
            first, second = up.chunk(2, -1)
            up = ACTIVATIONS[self._activation](first) * second
        else:
            up = self._linear.activated(x, layer.up, self._activation)
        return self._linear(up, layer.down, residual)

    def _embed(self, texts: Texts) -> Tensor:
        tokens, positions, types = (self._tables[name] for name in ("tokens", "positions", "types"))
        assert tokens is not None
        x = F.embedding(texts.token_ids, tokens)
        if types is not None:
            alone = not self._encoder.segments or list(texts.second) == list(texts.lengths)
            x = x + (types[0] if alone else types[_segments(texts)])
        if positions is not None:
            x = x + positions[_positions(texts) + self._encoder.first_position]
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def _rotation(self, texts: Texts, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = _positions(texts).float()[:, None, None, None] * frequencies
        return torch.cat((angles, angles), -1).cos().to(dtype), torch.cat((angles, angles), -1).sin().to(dtype)

    def _classify(self, pooled: Tensor) -> Tensor:
        assert self._encoder.classifier is not None
        get = self._parameters.get
        dense = F.linear(pooled, self._parameters["classifier.dense.weight"], get("classifier.dense.bias"))
        norm = self._norm("classifier.norm")
        x = ACTIVATIONS[self._encoder.classifier](dense)
        x = x if norm is None else norm(x)
        return F.linear(x, self._parameters["classifier.out.weight"], get("classifier.out.bias"))

    def _matrix(self, name: str) -> Any:
        bias = self._parameters.pop(f"{name}.bias", None)
        return self._linear.pack(self._parameters.pop(f"{name}.weight"), bias)

    def _norm(self, name: str) -> LayerNorm | None:
        weight = self._parameters.get(f"{name}.weight")
        if weight is None:
            return None
        return LayerNorm(weight, self._parameters.get(f"{name}.bias"), self._spec.norm_eps)


def _positions(texts: Texts) -> Tensor:
    return torch.cat([torch.arange(length) for length in texts.lengths])


def _segments(texts: Texts) -> Tensor:
    """1 for the tokens of a pair's second text, else 0."""
    each = zip(texts.lengths, texts.second, strict=True)
    return torch.cat([(torch.arange(length) >= second).long() for length, second in each])


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of heads [tokens, 2, heads, head_dim]."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


def _attend_near(q: Tensor, k: Tensor, v: Tensor, reach: int, out: Tensor) -> None:
    """Attention over `reach` tokens on either side, of tensors [texts, heads, length, head_dim], into `out` [texts,
    length, heads, head_dim]. The work grows with the length, not with its square."""
    length = q.shape[2]
    for begin in range(0, length, _QUERIES):
        end = min(begin + _QUERIES, length)
        first, last = max(begin - reach, 0), min(end + reach, length)
        distance = torch.arange(begin, end)[:, None] - torch.arange(first, last)
        seen = F.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], attn_mask=distance.abs() <= reach
        )
        out[:, begin:end] = seen.transpose(1, 2)
