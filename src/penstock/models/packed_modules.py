"""Replaces parts of a model of torch's modules by our kernels: plain Linear modules, a plain embedding that shares the
weight of one, norms, and MLPs, whose activation is computed with the first product."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.kernels import Kernels
from penstock.kernels.linear import Linear
from penstock.models.module_graphs import MlpParts, NormParts, mlp_of, norm_of

HALF_BLOCK = 8  # a packed gated weight has so many columns of the gate, then so many of what it gates, and so on


class PackedLinear(nn.Module):
    """Computes what an nn.Linear computes, with our kernels and a packed weight."""

    def __init__(self, linear: Linear, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.linear, self.packed = linear, linear.pack(weight, bias, gated=gated)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        return self.linear(rows, self.packed).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] as a plain matrix, for code that multiplies without this module. It is computed at each
        call."""
        product: Tensor = self(torch.eye(self.in_features, dtype=self.dtype))
        return (product if self.bias is None else product - self.bias).t()


class PackedHalf(nn.Module):
    """Computes one of the two linear modules that a gated weight holds: the gate (place 0), or what it gates (1)."""

    def __init__(self, both: PackedLinear, place: int) -> None:
        super().__init__()
        self.both, self.place = both, place

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.both(x).unflatten(-1, (-1, 2, HALF_BLOCK))
        half: Tensor = blocks[..., self.place, :].flatten(-2)
        return half


class PackedEmbedding(nn.Module):
    """Reads the rows of a head that is also the embedding."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.head = head

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self.head.linear.rows(token_ids.reshape(-1), self.head.packed, 1.0, self.head.dtype)
        return rows.view(*token_ids.shape, -1)


@dataclass(frozen=True)
class NormForward:
    """The forward of a norm, by our kernel."""

    kernels: Kernels
    module: nn.Module
    norm: NormParts

    def __call__(self, x: Tensor) -> Tensor:
        norm, kernels = self.norm, self.kernels
        if x.dtype != norm.weight.dtype:
            theirs: Tensor = type(self.module).forward(self.module, x)
            return theirs
        # Heads [1, heads, tokens, size] lie in memory with the tokens first.
        swapped = x.dim() == 4 and not x.is_contiguous()
        dense = (x.transpose(1, 2) if swapped else x).contiguous()
        rows = dense.view(-1, x.shape[-1])
        if norm.centered:
            normed, _ = kernels.layer_norm(rows, None, norm.weight, norm.bias, norm.eps)
        else:
            normed, _ = kernels.rms_norm(rows, None, norm.weight, norm.eps, 0.0)
        result: Tensor = normed.view(dense.shape)
        return result.transpose(1, 2) if swapped else result


@dataclass(frozen=True)
class MlpForward:
    """The forward of an MLP, with its activation in the first product."""

    up: PackedLinear  # of the gate too, if it is gated
    down: PackedLinear
    mlp: MlpParts

    def __call__(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        rows = x.reshape(-1, up.in_features).contiguous()
        activated = up.linear.gated if self.mlp.gate else up.linear.activated
        inner: Tensor = activated(rows, up.packed, self.mlp.activation)
        return down.linear(inner, down.packed).view(*x.shape[:-1], down.out_features)


# (parent, name, module) of each module with a weight, by the weight's address
_Users = Mapping[int, Sequence[tuple[nn.Module, str, nn.Module]]]


def pack_modules(model: nn.Module, kernels: Kernels) -> int:
    """Replaces each plain nn.Linear, and the forwards of norms and MLPs that our kernels compute. Returns the bytes of
    the packed weights.

    Subclasses of nn.Linear stay as they are, and so does a Linear whose weight something else uses, unless that is one
    plain embedding: its rows are then read from the packed weight."""
    users: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {}
    for parent in model.modules():
        for name, module in parent.named_children():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor):
                users.setdefault(weight.data_ptr(), []).append((parent, name, module))
    mlps = [(module, mlp) for module in model.modules() if (mlp := mlp_of(module)) is not None]
    nbytes: int = 0
    for module, mlp in mlps:
        if mlp.gate:
            nbytes += _pack_gated(module, mlp, kernels.linear, users)
    for places in users.values():
        kinds = sorted(type(module).__name__ for _, _, module in places)
        plain = next((module for _, _, module in places if type(module) is nn.Linear), None)
        if plain is None or kinds not in (["Linear"], ["Embedding", "Linear"]):
            continue
        if not any(getattr(parent, name) is module for parent, name, module in places):
            continue  # it is a half of a gated weight
        packed = PackedLinear(
            kernels.linear, plain.weight.detach(), None if plain.bias is None else plain.bias.detach()
        )
        nbytes += int(packed.packed.nbytes)
        for parent, name, module in places:
            setattr(parent, name, packed if module is plain else PackedEmbedding(packed))
    for module, mlp in mlps:
        up, down = getattr(module, mlp.up), getattr(module, mlp.down)
        # A gated MLP gets our forward only if its gate and `up` were packed together.
        first = up.both if isinstance(up, PackedHalf) else None if mlp.gate else up
        if isinstance(first, PackedLinear) and isinstance(down, PackedLinear):
            module.__dict__["forward"] = MlpForward(first, down, mlp)
    for module in model.modules():
        if (norm := norm_of(module)) is not None:
            module.__dict__["forward"] = NormForward(kernels, module, norm)
    return nbytes


@contextmanager
def their_forwards(model: nn.Module) -> Iterator[None]:
    """Removes our forwards from a model's modules until the context ends."""
    ours = [(module, module.__dict__.pop("forward")) for module in model.modules() if "forward" in vars(module)]
    try:
        yield
    finally:
        for module, forward in ours:
            module.__dict__["forward"] = forward


def _pack_gated(module: nn.Module, mlp: MlpParts, linear: Linear, users: _Users) -> int:
    """Packs the gate of an MLP with what it gates in one weight, if nothing else uses these. Returns its bytes; 0 if
    they stay apart."""
    halves: list[nn.Linear] = [getattr(module, mlp.gate), getattr(module, mlp.up)]
    gate, up = halves
    alone = all(len(users[half.weight.data_ptr()]) == 1 for half in halves)
    alike = gate.weight.shape == up.weight.shape and (gate.bias is None) == (up.bias is None)
    if not alone or not alike or gate.out_features % HALF_BLOCK:
        return 0
    bias = None if gate.bias is None else torch.cat((gate.bias.detach(), up.bias.detach()))
    weight = torch.cat((gate.weight.detach(), up.weight.detach()))
    both = PackedLinear(linear, weight, bias, gated=True)
    setattr(module, mlp.gate, PackedHalf(both, 0))
    setattr(module, mlp.up, PackedHalf(both, 1))
    return int(both.packed.nbytes)
