"""Products with weights: x W^T + b and what follows at once, and the rows of an embedding."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.elementwise import embedding, gelu_tanh_and_mul, silu_and_mul
from penstock.kernels.registry import normals

SMALL_WEIGHT = 1 << 20  # elements of a weight whose logits are computed in fp32 from its values as they are: a router
ACTIVATIONS = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}


class Linear(Protocol):
    """A provider of products. A weight is packed once into what the provider reads fastest."""

    def pack(self, weight: Any, bias: Tensor | None = None, *, gated: bool = False) -> Any:
        """weight [out, in], bias [out]. A gated weight is two of the same size: the gate, then what it gates. One that
        was packed while it was read (see packers.py) stays as it is."""
        ...

    def __call__(self, x: Tensor, weight: Any, residual: Tensor | None = None) -> Tensor:
        """x [tokens, in] to [tokens, out], plus a residual of that shape."""
        ...

    def gated(self, x: Tensor, weight: Any, activation: str) -> Any:
        """x [tokens, in] to [tokens, out / 2]: activation(gate) * the other half. The weight was packed as gated.
        The rows may come quantised, as a product with a weight of the same scheme reads them."""
        ...

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        """x [tokens, in] to fp32 [tokens, out]."""
        ...

    def rows(
        self, token_ids: Tensor, weight: Any, scale: float, dtype: torch.dtype, *, first: int | None = None
    ) -> Tensor:
        """The weight's rows for int64 token_ids [tokens], times `scale` rounded to `dtype`: an embedding. With `first`
        the weight is a part of the vocabulary, from that token on, and tokens outside it give zeros."""
        ...


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


class TorchLinear:
    """Weights as they are, multiplied by torch."""

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> DenseWeight:
        return DenseWeight(weight, bias)

    def __call__(self, x: Tensor, weight: DenseWeight, residual: Tensor | None = None) -> Tensor:
        product = F.linear(x, weight.weight, weight.bias)
        return product if residual is None else product.add_(residual)

    def gated(self, x: Tensor, weight: DenseWeight, activation: str) -> Tensor:
        return ACTIVATIONS[activation](self(x, weight))

    def logits(self, x: Tensor, weight: DenseWeight) -> Tensor:
        """Of a small weight, as a router's, not rounded to x's dtype on the way: that would choose between experts."""
        if weight.weight.numel() > SMALL_WEIGHT:
            return self(x, weight).float()
        bias = None if weight.bias is None else weight.bias.float()
        return F.linear(x.float(), weight.weight.float(), bias)

    def rows(
        self, token_ids: Tensor, weight: DenseWeight, scale: float, dtype: torch.dtype, *, first: int | None = None
    ) -> Tensor:
        return embedding(token_ids, weight.weight, scale, first)


def linear_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 2, 3, 4, 5, 17, 515):
        yield normal(rows, 40), normal(53, 40), None, None
        yield normal(rows, 37), normal(80, 37), normal(80), normal(rows, 80)
    yield normal(5, 8209), normal(301, 8209), normal(301), None


def gated_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 3, 14):
        for activation in ACTIVATIONS:
            yield normal(rows, 40), normal(2 * 52, 40), None, activation
            yield normal(rows, 64), normal(2 * 48, 64), normal(2 * 48), activation


def logits_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 9):
        yield normal(rows, 40), normal(131, 40)


def embedding_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal, generator = normals(dtype, seed), torch.Generator().manual_seed(seed)
    for rows in (0, 1, 7, 33):
        for scale, first in ((1.0, None), (24**0.5, None), (1.5, 0), (1.0, 8)):
            yield torch.randint(19 if first is None else 31, (rows,), generator=generator), normal(19, 24), scale, first


def run_linear(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, bias, residual = arguments
    result: Tensor = linear(x, linear.pack(weight, bias), residual)
    return result


def run_gated(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, bias, activation = arguments
    result: Tensor = linear.gated(x, linear.pack(weight, bias, gated=True), activation)
    return result


def run_logits(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight = arguments
    result: Tensor = linear.logits(x, linear.pack(weight))
    return result


def run_embedding(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    token_ids, weight, scale, first = arguments
    result: Tensor = linear.rows(token_ids, linear.pack(weight), scale, weight.dtype, first=first)
    return result
