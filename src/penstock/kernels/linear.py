"""Linears in torch: x W^T + b with the residual or activation that follows, logits, and embedding rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.elementwise import (
    capped,
    embedding,
    gelu_and_mul,
    gelu_tanh,
    gelu_tanh_and_mul,
    relu_squared,
    silu_and_mul,
    swiglu_oai_and_mul,
)

SMALL_WEIGHT = 1 << 20  # elements: logits of weights up to this size, such as a router's, are computed in fp32
ACTIVATIONS = {  # of gated weights
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "gelu": gelu_and_mul,
    "swiglu_oai": swiglu_oai_and_mul,
}
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu_squared": relu_squared,
}


class Linear(Protocol):
    """A provider of products with weights. A weight is packed once, into the layout that the provider reads fastest."""

    def pack(self, weight: Any, bias: Tensor | None = None, *, gated: bool = False) -> Any:
        """Pack a weight [out, in] and a bias [out]. A gated weight is two of the same size: the gate, then the
        projection that it gates. A weight that was packed while it was read (see packers.py) is returned as it is."""

    def __call__(self, x: Tensor, weight: Any, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """x [tokens, in] to [tokens, out], times `scale`, plus a residual of that shape."""

    def gated(self, x: Tensor, weight: Any, activation: str) -> Any:
        """x [tokens, in] to [tokens, out / 2]: activation(gate) * the other half. The weight was packed as gated.
        The rows may come quantised, as a product with a weight of the same scheme reads them."""

    def activated(self, x: Tensor, weight: Any, activation: str) -> Tensor:
        """x [tokens, in] to [tokens, out], each value activated. The weight is not gated."""

    def logits(self, x: Tensor, weight: Any, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """x [tokens, in] to fp32 [tokens, out], times `scale`; then bounded by `softcap` (0: not), with a tanh."""

    def rows(
        self, token_ids: Tensor, weight: Any, scale: float, dtype: torch.dtype, *, first: int | None = None
    ) -> Tensor:
        """An embedding: the weight's rows for int64 token_ids [tokens], times `scale` rounded to `dtype`. With `first`
        the weight is a part of the vocabulary that begins with that token, and tokens outside it give zeros."""


@dataclass(frozen=True)
class DenseWeight:
    weight: Tensor
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def scaled_logits(logits: Tensor, scale: float, softcap: float) -> Tensor:
    """fp32 logits times `scale`, then bounded by `softcap`."""
    if scale != 1.0:
        logits = logits * scale
    return capped(logits, softcap) if softcap else logits


class TorchLinear:
    """Products by torch, with unpacked weights."""

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> DenseWeight:
        return DenseWeight(weight, bias)

    def __call__(self, x: Tensor, weight: DenseWeight, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        product = F.linear(x, weight.weight, weight.bias)
        if scale != 1.0:
            product.mul_(scale)
        return product if residual is None else product.add_(residual)

    def gated(self, x: Tensor, weight: DenseWeight, activation: str) -> Tensor:
        return ACTIVATIONS[activation](self(x, weight))

    def activated(self, x: Tensor, weight: DenseWeight, activation: str) -> Tensor:
        return UNGATED[activation](self(x, weight))

    def by_head(self, x: Tensor, weight: DenseWeight, heads: int) -> Tensor:
        """x [tokens, heads * in] to [tokens, heads * out]: each head's part of x times its own rows of the weight
        [heads * out, in]. `out` is a multiple of 16."""
        return torch.einsum(
            "thk,hnk->thn", x.unflatten(1, (heads, -1)), weight.weight.unflatten(0, (heads, -1))
        ).flatten(1)

    def logits(self, x: Tensor, weight: DenseWeight, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """A small weight, such as a router's, is multiplied in fp32: rounding to x's dtype could choose another
        expert."""
        if weight.weight.numel() > SMALL_WEIGHT:
            return scaled_logits(self(x, weight).float(), scale, softcap)
        bias = None if weight.bias is None else weight.bias.float()
        return scaled_logits(F.linear(x.float(), weight.weight.float(), bias), scale, softcap)

    def rows(
        self, token_ids: Tensor, weight: DenseWeight, scale: float, dtype: torch.dtype, *, first: int | None = None
    ) -> Tensor:
        return embedding(token_ids, weight.weight, scale, first)
