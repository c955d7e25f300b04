"""Layers with a state in torch: gated delta nets and Mamba 2. Beside them, the gate of an attention's output.

The recurrence is computed token after token, each sequence by itself: a token's result depends neither on how a prompt
is divided nor on the rest of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.batch_arrays import BATCH_ROW, CONTEXT, FIRST, LENGTH

UNIT_EPS = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True)
class RecurrenceWeights:
    """float32 weights of a layer with a state, besides its projections. With `skip` it is a Mamba 2 layer, without it a
    gated delta net (see `recurrence`)."""

    conv: Tensor  # [taps, channels]
    conv_bias: Tensor | None  # [channels]
    decay: Tensor  # [heads], negative
    step_bias: Tensor  # [heads]
    skip: Tensor | None  # [heads]
    norm: Tensor  # of the output of all heads, or of each
    key_heads: int
    key_dim: int
    norm_width: int  # elements of the output that are normed together
    eps: float
    tiled: bool = False  # value head i reads key head i % key_heads; False: those of a key head follow each other

    @property
    def heads(self) -> int:
        """Value heads, each with a matrix [key_dim, value_dim]."""
        return len(self.decay)

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries and keys of the key heads, and values."""
        return self.conv.shape[1]

    @property
    def value_width(self) -> int:
        return self.channels - 2 * self.key_heads * self.key_dim

    @property
    def matrices(self) -> int:
        """Elements of the matrices of all heads, with which a state begins. The last inputs of the convolution, [taps -
        1, channels], follow."""
        return self.key_dim * self.value_width

    @property
    def nbytes(self) -> int:
        each = (getattr(self, field.name) for field in fields(self))
        return sum(tensor.nbytes for tensor in each if isinstance(tensor, Tensor))


# See `recurrence`.
Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, RecurrenceWeights], Tensor]


def recurrence(inputs: Tensor, rates: Tensor, units: Tensor, states: Tensor, weights: RecurrenceWeights) -> Tensor:
    """The output [tokens, value_width] like the inputs [tokens, channels + value_width]: queries, keys, values, gates.

    Queries, keys and values are convolved along the tokens, and SiLU is applied. Then each head's matrix S is updated,
    with s = softplus(rate + step_bias) and the decay a = exp(decay * s):
    - of a delta net S = a S + k (c (v - k^T a S))^T, with unit k and q / sqrt(key_dim), and c the sigmoid of a rate;
    - of Mamba 2: S = a S + k (s v)^T.
    A head reads q^T S, and Mamba 2 adds skip * v. A delta net norms this and multiplies it by SiLU(gate); Mamba 2 does
    it in the other order.

    `rates` fp32 [tokens, heads], before them those of c. `units` int32 [sequences, UNIT_LINES], `states` fp32 [rows of
    the batch, elements]: the units' rows are updated. A sequence's first unit begins with zeros.
    """
    out = inputs.new_empty(len(inputs), weights.value_width)
    for unit in units.tolist():
        first, length = unit[FIRST], unit[LENGTH]
        tokens, state = slice(first, first + length), states[unit[BATCH_ROW]]
        if unit[CONTEXT] == length:
            state.zero_()
        out[tokens] = _sequence(inputs[tokens].float(), rates[tokens], state, weights).to(out.dtype)
    return out


def _sequence(inputs: Tensor, rates: Tensor, state: Tensor, weights: RecurrenceWeights) -> Tensor:
    """The output of one sequence's next tokens. Updates its state."""
    heads, width = weights.heads, weights.key_heads * weights.key_dim
    given, gates = inputs.split((weights.channels, weights.value_width), 1)
    mixed = _convolved(given, state[weights.matrices :].view(-1, weights.channels), weights)
    query, key, value = mixed.split((width, width, weights.value_width), 1)
    query, key = (each.unflatten(1, (-1, weights.key_dim)) for each in (query, key))
    steps = F.softplus(rates[:, -heads:] + weights.step_bias)
    value = value.unflatten(1, (heads, -1))
    if weights.skip is None:
        query, key = _unit(query) * weights.key_dim**-0.5, _unit(key)
        scale = rates[:, :heads].sigmoid()
    else:
        scale = steps
    shared = heads // weights.key_heads
    if weights.tiled:
        query, key = (each.repeat(1, shared, 1)[..., None] for each in (query, key))
    else:
        query, key = (each.repeat_interleave(shared, 1)[..., None] for each in (query, key))
    kept = (weights.decay * steps).exp()
    matrices = state[: weights.matrices].view(heads, weights.key_dim, -1)
    read = torch.empty_like(value)
    for i in range(len(given)):
        matrices *= kept[i, :, None, None]
        added = value[i] if weights.skip is not None else value[i] - (matrices * key[i]).sum(1)
        matrices += key[i] * (added * scale[i, :, None])[:, None]
        read[i] = (matrices * query[i]).sum(1)
    if weights.skip is not None:
        return _normed((read + weights.skip[:, None] * value).flatten(1) * F.silu(gates), weights)
    return _normed(read.flatten(1), weights) * F.silu(gates)


def _convolved(given: Tensor, before: Tensor, weights: RecurrenceWeights) -> Tensor:
    """Replaces `before`, the last inputs before those given, by the last ones."""
    padded = torch.cat((before, given))
    mixed = torch.zeros_like(given) if weights.conv_bias is None else weights.conv_bias.expand_as(given).clone()
    for tap, factors in enumerate(weights.conv):
        mixed += padded[tap : tap + len(given)] * factors
    before.copy_(padded[len(given) :])
    return F.silu(mixed)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def _normed(x: Tensor, weights: RecurrenceWeights) -> Tensor:
    parts = x.unflatten(1, (-1, weights.norm_width))
    parts = parts * (parts.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
    normed: Tensor = parts.flatten(1).unflatten(1, (-1, len(weights.norm))) * weights.norm
    return normed.flatten(1)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), computed in fp32 and rounded once."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y
