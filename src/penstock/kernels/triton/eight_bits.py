"""Products of 8-bit rows with 8-bit weights, int8 (W8A8) or fp8. Sums are scaled by row and column."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.epilogue import launch, store_product
from penstock.kernels.triton.overlap import await_inputs
from penstock.kernels.triton.quantized import QuantizedRows
from penstock.kernels.triton.tiles import tile_product
from penstock.kernels.triton.weights import QuantizedWeight

DEPTH = 128  # of an iteration along k. Hopper adds fp8 products in fewer bits than fp32 has: only so many, then in fp32
LIBRARY_ROWS = 64  # fp8 of more rows is multiplied by torch's library, which does not divide k among programs
LIBRARY_MULTIPLE = 16  # n and k must be multiples of this for the library


def eight_bit_linear(
    x: QuantizedRows, weight: QuantizedWeight, residual: Tensor | None, dtype: torch.dtype, *, fixed: bool = False
) -> Tensor:
    """x [rows, k] to [rows, n] of the dtype, plus bias and a residual of that shape. `fixed`: see tile_product."""
    rows, (n, k) = len(x.values), weight.shape
    if x.values.is_cuda and not fixed and _suits_library(x, weight, dtype):
        product = torch._scaled_mm(
            x.values,
            weight.values.t(),
            scale_a=x.scales,
            scale_b=weight.scales[None],
            bias=None if weight.bias is None else weight.bias.to(dtype),
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return product if residual is None else product.add_(residual)
    out = torch.empty(rows, n, dtype=dtype, device=x.values.device)
    tiling = tile_product(rows, n, k, fixed=fixed)
    return launch(
        _eight_bits,
        (x.values, x.scales, weight.values, weight.scales),
        weight.bias,
        residual,
        out,
        tiling,
        (k, tiling.span(k, DEPTH)),
        DEPTH=DEPTH,
    )


def _suits_library(x: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True if torch._scaled_mm can be used. It scales by row and column only on Hopper and later, and returns bf16."""
    n, k = weight.shape
    return (
        x.values.dtype == torch.float8_e4m3fn
        and dtype == torch.bfloat16
        and len(x.values) > LIBRARY_ROWS
        and n % LIBRARY_MULTIPLE == k % LIBRARY_MULTIPLE == 0
        and torch.cuda.get_device_capability(x.values.device) >= (9, 0)
    )


@triton.jit(do_not_specialize=["rows"])
def _eight_bits(
    x,
    x_scales,
    weight,
    scales,
    bias,
    residual,
    out,
    sums,
    arrivals,
    rows,
    n,
    width,
    k,
    span,  # length of a part of k
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    JOIN: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program computes one tile of the product over one part of k."""
    await_inputs(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    real = row < rows
    within = column < n
    lines = x + row.to(tl.int64)[:, None] * k
    columns = weight + column.to(tl.int64)[None, :] * k
    total = tl.zeros([ROWS, COLUMNS], tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32)
    for start in range(part * span, tl.minimum(part * span + span, k), DEPTH):
        at = start + tl.arange(0, DEPTH)
        left = tl.load(lines + at[None, :], mask=real[:, None] & (at < k)[None, :], other=0.0)
        right = tl.load(columns + at[:, None], mask=within[None, :] & (at < k)[:, None], other=0.0)
        total = tl.dot(left, right, total, out_dtype=total.dtype, max_num_imprecise_acc=DEPTH)
    by_row = tl.load(x_scales + row, mask=real, other=0.0)[:, None]
    by_column = tl.load(scales + column, mask=within, other=0.0)[None, :]
    product = total.to(tl.float32) * by_row * by_column
    store_product(
        product, out, sums, arrivals, row, column, rows, n, width, bias, residual, HAS_BIAS, HAS_RESIDUAL, PARTS, JOIN
    )
