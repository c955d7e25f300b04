"""x W^T + b, with weights that are streamed from memory."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.registry import ROUNDING, Op, Platform, Provider, reference

GEMV_ROWS = 3  # so many products of a matrix and a vector are faster than one of matrices
BLOCK_ELEMENTS = 1 << 20  # of weights widened at once: 4 MiB, which stay in cache
TILE_ROWS = 512  # of x multiplied at once: bounds the fp32 product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [tokens, in] times weight [out, in] transposed, plus bias [out], like x."""
    return F.linear(x, weight, bias)


class BlockedLinear:
    """For CPUs that cannot multiply bf16: torch then falls back to a loop that reads a weight for every row.

    One row is a matrix times a vector, which torch does well. For more, blocks of weight rows are widened to fp32 into
    a scratch that stays in cache, and multiplied there: memory is read once, and in bf16.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(BLOCK_ELEMENTS)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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


def _inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for rows in (0, 1, 2, 4, 5, 17, TILE_ROWS + 3):
        yield normal(rows, 40), normal(53, 40), None
        yield normal(rows, 40), normal(53, 40), normal(53)
    yield normal(5, 8209), normal(301, 8209), normal(301)  # several blocks, the last one partial


def _no_bf16_gemm(platform: Platform, dtype: torch.dtype) -> bool:
    return platform.device == "cpu" and dtype is not torch.float32 and not platform.bf16_gemm


LINEAR = Op("linear", reference(linear), ROUNDING, _inputs, (Provider("blocked_fp32", BlockedLinear, _no_bf16_gemm),))
