"""x W^T + b, with weights that are streamed from memory."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.registry import ROUNDING, Op, Platform, Provider, reference

GEMV_ROWS = 3  # so many products of a matrix and a vector are faster than one of matrices
SCRATCH_ELEMENTS = 512 * 1024  # fp32 elements of a block: 2 MiB, which stays in the cache of two cores
THIN_ROWS = 64  # up to here the weights are the left operand: MKL splits the larger side among its threads


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [tokens, in] times weight [out, in] transposed, plus bias [out], like x."""
    return F.linear(x, weight, bias)


class BlockedLinear:
    """For CPUs that cannot multiply bf16: torch then falls back to a loop that reads a weight for every row.

    One row is a matrix times a vector, which torch does well. For more, blocks of weight rows are widened to fp32 into
    a scratch that stays in cache, and multiplied there: memory is read once, and in bf16.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(SCRATCH_ELEMENTS)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if rows <= GEMV_ROWS:
            if rows <= 1:
                return F.linear(x, weight, bias)
            return torch.stack([F.linear(row, weight, bias) for row in x.unbind()])
        if rows <= THIN_ROWS:
            return self._thin(x, weight, bias)
        return self._wide(x, weight, bias)

    def _blocks(self, weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, end row, fp32 copy) of each block of the weight. The copy lives until the next one."""
        count, columns = weight.shape
        if self._scratch.numel() < columns:
            self._scratch = torch.empty(columns)
        step = self._scratch.numel() // columns
        for start in range(0, count, step):
            end = min(start + step, count)
            block = self._scratch[: (end - start) * columns].view(end - start, columns)
            yield start, end, block.copy_(weight[start:end])

    def _thin(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, columns = x.shape
        # MKL is fast at 4 columns where they are contiguous, at multiples of 16 where rows are, and poor in between.
        padded = 4 if rows <= 4 else -(-rows // 16) * 16
        right = torch.zeros(padded, columns).t() if padded == 4 else torch.zeros(columns, padded)
        right[:, :rows] = x.t()
        out = torch.empty(weight.shape[0], padded)
        for start, end, block in self._blocks(weight):
            torch.mm(block, right, out=out[start:end])
        if bias is not None:
            out += bias[:, None]
        return out[:, :rows].to(x.dtype).t().contiguous()

    def _wide(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        left = x.float()
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        for start, end, block in self._blocks(weight):
            product = torch.mm(left, block.t())
            out[:, start:end] = product if bias is None else product.add_(bias[start:end])
        return out


def _inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for rows in (0, 1, 2, 4, 5, 17, 70):
        yield normal(rows, 40), normal(53, 40), None
        yield normal(rows, 40), normal(53, 40), normal(53)
    yield normal(5, 2053), normal(301, 2053), normal(301)  # several blocks, the last one partial
    yield normal(66, 2053), normal(301, 2053), normal(301)


def _no_bf16_gemm(platform: Platform, dtype: torch.dtype) -> bool:
    return platform.device == "cpu" and dtype is not torch.float32 and not platform.bf16_gemm


LINEAR = Op("linear", reference(linear), ROUNDING, _inputs, (Provider("blocked_fp32", BlockedLinear, _no_bf16_gemm),))
