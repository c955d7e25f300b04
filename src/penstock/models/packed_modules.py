"""Gives a model of torch's modules our products: each plain Linear, and a plain embedding that shares its matrix."""

import torch
from torch import Tensor, nn

from penstock.kernels.linear import Linear


class PackedLinear(nn.Module):
    """Computes what an nn.Linear computes, with a weight that is packed for our kernels."""

    def __init__(self, linear: Linear, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.linear, self.packed = linear, linear.pack(weight, bias)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        return self.linear(rows, self.packed).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] without its layout, for code that multiplies by itself. It is computed at each call."""
        product: Tensor = self(torch.eye(self.in_features, dtype=self.dtype))
        return (product if self.bias is None else product - self.bias).t()


class PackedEmbedding(nn.Module):
    """Reads the rows of a head that is also the embedding."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self.head = head

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self.head.linear.rows(token_ids.reshape(-1), self.head.packed, 1.0, self.head.dtype)
        return rows.view(*token_ids.shape, -1)


def pack_modules(model: nn.Module, linear: Linear) -> int:
    """Replaces each plain nn.Linear. Returns the bytes of the packed weights.

    Subclasses stay as they are, and so does a Linear whose weight something else uses, unless that is one plain
    embedding: its rows are then read from the packed weight."""
    users: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {}  # (parent, name, module) by the weight's address
    for parent in model.modules():
        for name, module in parent.named_children():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor):
                users.setdefault(weight.data_ptr(), []).append((parent, name, module))
    nbytes: int = 0
    for places in users.values():
        kinds = sorted(type(module).__name__ for _, _, module in places)
        plain = next((module for _, _, module in places if type(module) is nn.Linear), None)
        if plain is None or kinds not in (["Linear"], ["Embedding", "Linear"]):
            continue
        packed = PackedLinear(linear, plain.weight.detach(), None if plain.bias is None else plain.bias.detach())
        nbytes += int(packed.packed.nbytes)
        for parent, name, module in places:
            setattr(parent, name, packed if module is plain else PackedEmbedding(packed))
    return nbytes
