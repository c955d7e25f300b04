"""Replaces parts of a model of torch's modules by our kernels: plain Linear modules, a plain embedding that shares the
weight of one, norms, and MLPs, whose activation is computed with the first product."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.kernels import Kernels
from penstock.models.module_graphs import MlpParts, NormParts, mlp_of, norm_of
from penstock.models.product import Product

HALF_BLOCK = 8  # a packed gated weight has so many columns of the gate, then so many of what it gates, and so on


class PackedLinear(nn.Module):
    """Computes what an nn.Linear computes, with our kernels."""

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, *, gated: bool = False, name: str = ""
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.product = Product.pack(kernels, weight, bias, gated=gated, name=name)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        return self.product(rows).view(*x.shape[:-1], self.out_features)

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
        rows = self.head.product.rows(token_ids.reshape(-1), 1.0, self.head.dtype)
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
        inner = up.product.activated(rows, self.mlp.activation)
        return down.product(inner).view(*x.shape[:-1], down.out_features)


# A module with a weight: its parent, its name there and itself.
_Place = tuple[nn.Module, str, nn.Module]


class ModulePacking:
    """Our kernels in place of a model's modules: of each plain nn.Linear, and in the forwards of norms and MLPs.

    The constructor finds the modules and `pack` changes them. A subclass of nn.Linear stays as it is, and so does a
    linear whose weight something else uses, unless that is one plain embedding: its rows are then read from the packed
    weight."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        users: dict[int, list[_Place]] = {}  # by the weight's address
        for parent in model.modules():
            for name, module in parent.named_children():
                weight = getattr(module, "weight", None)
                if isinstance(weight, Tensor):
                    users.setdefault(weight.data_ptr(), []).append((parent, name, module))
        mlps = {module: mlp for module in model.modules() if (mlp := mlp_of(module)) is not None}
        self._gated = {module: mlp for module, mlp in mlps.items() if mlp.gate and _fit_together(module, mlp, users)}
        halves = {getattr(module, name) for module, mlp in self._gated.items() for name in (mlp.gate, mlp.up)}
        self._linears: dict[nn.Module, list[_Place]] = {}
        for places in users.values():
            plain = next((module for _, _, module in places if type(module) is nn.Linear), None)
            kinds = sorted(type(module).__name__ for _, _, module in places)
            if plain is not None and plain not in halves and kinds in (["Linear"], ["Embedding", "Linear"]):
                self._linears[plain] = places
        # A gated MLP gets our forward only if its gate and `up` are packed together.
        self._mlps = {
            module: mlp
            for module, mlp in mlps.items()
            if getattr(module, mlp.down) in self._linears
            and (module in self._gated if mlp.gate else getattr(module, mlp.up) in self._linears)
        }

    def pack(self, kernels: Kernels) -> int:
        """Changes the model. Returns the bytes of the packed weights."""
        nbytes: int = 0
        for module, mlp in self._gated.items():
            nbytes += _pack_gated(module, mlp, kernels)
        for linear, places in self._linears.items():
            assert isinstance(linear, nn.Linear)
            bias = None if linear.bias is None else linear.bias.detach()
            name = next(name for _, name, module in places if module is linear)
            packed = PackedLinear(kernels, linear.weight.detach(), bias, name=name)
            nbytes += packed.product.nbytes
            for parent, name, module in places:
                setattr(parent, name, packed if module is linear else PackedEmbedding(packed))
        for module, mlp in self._mlps.items():
            up, down = getattr(module, mlp.up), getattr(module, mlp.down)
            module.__dict__["forward"] = MlpForward(up.both if mlp.gate else up, down, mlp)
        for module in self._model.modules():
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


def _halves(module: nn.Module, mlp: MlpParts) -> tuple[nn.Linear, nn.Linear]:
    gate, up = getattr(module, mlp.gate), getattr(module, mlp.up)
    assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)
    return gate, up


def _fit_together(module: nn.Module, mlp: MlpParts, users: Mapping[int, Sequence[_Place]]) -> bool:
    """Whether the gate of an MLP and what it gates can be one packed weight: nothing else uses them."""
    gate, up = _halves(module, mlp)
    alone = all(len(users[half.weight.data_ptr()]) == 1 for half in (gate, up))
    alike = gate.weight.shape == up.weight.shape and (gate.bias is None) == (up.bias is None)
    return alone and alike and gate.out_features % HALF_BLOCK == 0


def _pack_gated(module: nn.Module, mlp: MlpParts, kernels: Kernels) -> int:
    """Packs the gate of an MLP with what it gates in one weight. Returns its bytes."""
    gate, up = _halves(module, mlp)
    bias = None if gate.bias is None else torch.cat((gate.bias.detach(), up.bias.detach()))
    weight = torch.cat((gate.weight.detach(), up.weight.detach()))
    both = PackedLinear(kernels, weight, bias, gated=True, name="gate_up")
    setattr(module, mlp.gate, PackedHalf(both, 0))
    setattr(module, mlp.up, PackedHalf(both, 1))
    return both.product.nbytes
