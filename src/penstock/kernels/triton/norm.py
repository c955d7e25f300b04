"""RMSNorm of x + residual, and the same with the rows quantised by the same kernel."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.overlap import await_inputs, overlap
from penstock.kernels.triton.quantized import LIMITS, QuantizedRows, quantize, row_scale
from penstock.kernels.triton.weights import QuantizedWeight

ELEMENTS_OF_WARP = 256  # 16 bytes of bf16 per thread

Rows = Tensor | QuantizedRows


class TritonNorm:
    """Provides rms_norm (see kernels/elementwise.py)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(x)
        return normed, _launch(x, residual, weight, normed, None, eps, offset, scale)

    def before(self, weight: Any) -> Callable[..., tuple[Rows, Tensor]]:
        """The norm for rows that only products with `weight` read: quantised, if these read quantised rows."""
        if isinstance(weight, QuantizedWeight):
            return partial(self.quantized, dtype=weight.values.dtype)
        return self

    def quantized(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        scale: float = 1.0,
        *,
        dtype: torch.dtype,
    ) -> tuple[QuantizedRows, Tensor]:
        """`__call__` with the norm quantised to fp8 or int8, with the bits of quantize_rows."""
        normed = QuantizedRows.empty(x, x.shape[1], dtype)
        return normed, _launch(x, residual, weight, normed.values, normed.scales, eps, offset, scale)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    scales: Tensor | None,
    eps: float,
    offset: float,
    scale: float,
) -> Tensor:
    """Fill `normed` and `scales`, and return (x + residual) * scale, or x without a residual."""
    rows, width = x.shape
    total = x if residual is None else torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        _norm[(rows,)](
            x,
            residual,
            weight,
            normed,
            total,
            scales,
            width,
            eps,
            offset,
            scale,
            HAS_RESIDUAL=residual is not None,
            HAS_OFFSET=offset != 0.0,
            SCALED=scale != 1.0,
            LIMIT=0.0 if scales is None else LIMITS[normed.dtype],
            COLUMNS=block,
            num_warps=min(max(block // ELEMENTS_OF_WARP, 1), 16),
            **overlap(),
        )
    return total


@triton.jit
def _norm(
    x,
    residual,
    weight,
    normed,
    total,
    scales,
    width,
    eps,
    offset,
    factor_of_sum,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest quantised magnitude; 0: not quantised
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program computes one row of contiguous tensors. It rounds where the reference does."""
    await_inputs(OVERLAP)
    dtype = x.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, COLUMNS)
    inside = column < width
    wide = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + first + column, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            wide *= factor_of_sum
        tl.store(total + first + column, wide.to(dtype), mask=inside)
        wide = wide.to(dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    if HAS_OFFSET:
        out = scaled * (factor + offset)
    else:
        out = scaled.to(dtype).to(tl.float32) * factor
    if LIMIT == 0.0:
        tl.store(normed + first + column, out.to(dtype), mask=inside)
    else:
        out = out.to(dtype).to(tl.float32)
        scale, inverse = row_scale(tl.max(tl.abs(out), 0), tl.sum(out * 0.0, 0), LIMIT)
        tl.store(scales + tl.program_id(0), scale)
        tl.store(normed + first + column, quantize(out, inverse, normed.dtype.element_ty), mask=inside)
