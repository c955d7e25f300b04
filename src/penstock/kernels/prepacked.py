"""Products of encoders: with the activation that follows, and with weights that oneDNN has packed once.

torch's own F.linear packs a weight anew at each call, which costs a short text several times what its products do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.linear import Linear

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "tanh": torch.tanh,
    }
)
_ROWS = 512  # for which oneDNN chooses the layout; it reads any number
# The names of activations in oneDNN: (attribute, algorithm)
_FUSED = {
    "": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}


class ActivatedLinear(Protocol):
    """A provider of products and the activation that follows them."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Pack a weight [out, in] and a bias [out]."""
        ...

    def __call__(self, x: Tensor, weight: Any, residual: Tensor | None = None) -> Tensor:
        """x [tokens, in] to [tokens, out], plus a residual of that shape, which may be overwritten."""
        ...

    def activated(self, x: Tensor, weight: Any, activation: str) -> Tensor:
        """x [tokens, in] to [tokens, out], after an activation of ACTIVATIONS."""
        ...


class SeparateActivation:
    """Provides ActivatedLinear with any products: the activation is an op of its own."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        return self._linear.pack(weight, bias)

    def __call__(self, x: Tensor, weight: Any, residual: Tensor | None = None) -> Tensor:
        return self._linear(x, weight, residual)

    def activated(self, x: Tensor, weight: Any, activation: str) -> Tensor:
        return ACTIVATIONS[activation](self._linear(x, weight))


@dataclass(frozen=True)
class PrepackedWeight:
    packed: Tensor
    bias: Tensor | None
    nbytes: int


class PrepackedLinear:
    """Provides ActivatedLinear by oneDNN, through the ops of torch's own compiler."""

    @staticmethod
    def available() -> bool:
        return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PrepackedWeight:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        return PrepackedWeight(packed, bias, weight.nbytes + (0 if bias is None else bias.nbytes))

    def __call__(self, x: Tensor, weight: PrepackedWeight, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return self.activated(x, weight, "")
        product: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight.packed, weight.bias, "add")
        return product

    def activated(self, x: Tensor, weight: PrepackedWeight, activation: str) -> Tensor:
        attribute, algorithm = _FUSED[activation]
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.packed, weight.bias, attribute, [], algorithm)
        return product
