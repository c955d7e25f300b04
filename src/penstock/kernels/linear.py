"""Products with weights: x W^T + b and what follows at once, and the rows of an embedding."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.elementwise import embedding, gelu_tanh_and_mul, silu_and_mul
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.session import native_session
from penstock.kernels.registry import (
    EXACT,
    ROUNDING,
    Needs,
    Op,
    Platform,
    Provider,
    has_fixed_triton,
    has_native,
    has_triton,
    normals,
)

GEMV_ROWS = 3  # so many products of a matrix and a vector are faster than one of matrices
BLOCK_ELEMENTS = 1 << 20  # of weights widened at once: 4 MiB, which stay in cache
TILE_ROWS = 512  # of x multiplied at once: bounds the fp32 product
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

    def gated(self, x: Tensor, weight: Any, activation: str) -> Tensor:
        """x [tokens, in] to [tokens, out / 2]: activation(gate) * the other half. The weight was packed as gated."""
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
        product = self._product(x, weight.weight, weight.bias)
        return product if residual is None else product.add_(residual)

    def gated(self, x: Tensor, weight: DenseWeight, activation: str) -> Tensor:
        return ACTIVATIONS[activation](self(x, weight))

    def logits(self, x: Tensor, weight: DenseWeight) -> Tensor:
        """Of a small weight, as a router's, not rounded to x's dtype on the way: that would choose between experts."""
        if weight.weight.numel() > BLOCK_ELEMENTS:
            return self(x, weight).float()
        bias = None if weight.bias is None else weight.bias.float()
        return F.linear(x.float(), weight.weight.float(), bias)

    def rows(
        self, token_ids: Tensor, weight: DenseWeight, scale: float, dtype: torch.dtype, *, first: int | None = None
    ) -> Tensor:
        return embedding(token_ids, weight.weight, scale, first)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class BlockedLinear(TorchLinear):
    """For CPUs that cannot multiply bf16: torch then falls back to a loop that reads a weight for every row.

    One row is a matrix times a vector, which torch does well. For more, blocks of weight rows are widened to fp32 into
    a scratch that stays in cache, and multiplied there: memory is read once, and in bf16.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(BLOCK_ELEMENTS)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if rows <= 1:
            return F.linear(x, weight, bias)
        if rows <= GEMV_ROWS:
            return torch.stack([F.linear(row, weight, bias) for row in x.unbind()])
        if rows <= TILE_ROWS:
            return self._multiply(x, weight, bias)
        return torch.cat([self._multiply(tile, weight, bias) for tile in torch.split(x, TILE_ROWS)])

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The weights are the left operand, as MKL splits the larger side among its threads."""
        rows, columns = x.shape
        # MKL is fast at 4 columns where they are contiguous, at multiples of 16 where rows are, and poor in between.
        padded = 4 if rows <= 4 else -(-rows // 16) * 16
        right = torch.zeros(padded, columns).t() if padded == 4 else torch.zeros(columns, padded)
        right[:, :rows] = x.float().t()
        out = torch.empty(weight.shape[0], padded)
        step = max(self._scratch.numel() // columns, 1)
        if self._scratch.numel() < columns:
            self._scratch = torch.empty(columns)
        for start in range(0, weight.shape[0], step):
            block = weight[start : start + step]
            wide = self._scratch[: block.numel()].view(block.shape).copy_(block)
            torch.mm(wide, right, out=out[start : start + step])
        if bias is not None:
            out += bias[:, None]
        return out[:, :rows].t().contiguous().to(x.dtype)  # a transposing copy is faster without the cast


def _linear_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 2, 3, 4, 5, 17, TILE_ROWS + 3):
        yield normal(rows, 40), normal(53, 40), None, None
        yield normal(rows, 37), normal(80, 37), normal(80), normal(rows, 80)
    yield normal(5, 8209), normal(301, 8209), normal(301), None  # several blocks, the last one partial


def _gated_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 3, 14):
        for activation in ACTIVATIONS:
            yield normal(rows, 40), normal(2 * 52, 40), None, activation
            yield normal(rows, 64), normal(2 * 48, 64), normal(2 * 48), activation


def _logits_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 9):
        yield normal(rows, 40), normal(131, 40)


def _embedding_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal, generator = normals(dtype, seed), torch.Generator().manual_seed(seed)
    for rows in (0, 1, 7, 33):
        for scale, first in ((1.0, None), (24**0.5, None), (1.5, 0), (1.0, 8)):
            yield torch.randint(19 if first is None else 31, (rows,), generator=generator), normal(19, 24), scale, first


def _run_linear(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, bias, residual = arguments
    result: Tensor = linear(x, linear.pack(weight, bias), residual)
    return result


def _run_gated(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, bias, activation = arguments
    result: Tensor = linear.gated(x, linear.pack(weight, bias, gated=True), activation)
    return result


def _run_logits(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight = arguments
    result: Tensor = linear.logits(x, linear.pack(weight))
    return result


def _run_embedding(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    token_ids, weight, scale, first = arguments
    result: Tensor = linear.rows(token_ids, linear.pack(weight), scale, weight.dtype, first=first)
    return result


def no_bf16_gemm(platform: Platform, needs: Needs) -> bool:
    """Where torch would multiply rows one by one."""
    return platform.device == "cpu" and needs.dtype is not torch.float32 and not platform.bf16_gemm


def _triton(*, fixed: bool = False) -> Linear:
    from penstock.kernels.triton.linear import TritonLinear

    return TritonLinear(fixed=fixed)


_TORCH = Provider("torch", TorchLinear, lambda platform, needs: True)
_PROVIDERS = (
    Provider("native", lambda: NativeLinear(native_session()), has_native),
    Provider("blocked_fp32", BlockedLinear, no_bf16_gemm),
    Provider("triton_fixed", partial(_triton, fixed=True), has_fixed_triton),
    Provider("triton", _triton, has_triton),
)
LINEAR = Op("linear", _TORCH, ROUNDING, _linear_inputs, _PROVIDERS, _run_linear)
# The same providers by their other methods.
GATED_LINEAR = Op("gated_linear", _TORCH, ROUNDING, _gated_inputs, _PROVIDERS, _run_gated)
LOGITS = Op("logits", _TORCH, ROUNDING, _logits_inputs, _PROVIDERS, _run_logits)
EMBEDDING = Op("embedding", _TORCH, EXACT, _embedding_inputs, _PROVIDERS, _run_embedding)
