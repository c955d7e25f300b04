"""Products with dense weights. cuBLAS's are not divided in one way for any number of rows, and not launched early."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.linear import DenseWeight
from penstock.kernels.triton.epilogue import launch, store_product
from penstock.kernels.triton.overlap import await_inputs
from penstock.kernels.triton.tiles import precision, tile_product

DEPTH_BYTES = 128  # of an iteration along k


def dense_linear(
    x: Tensor, weight: DenseWeight, residual: Tensor | None, dtype: torch.dtype, *, fixed: bool = True
) -> Tensor:
    """x [rows, k] to [rows, n] of the dtype, plus bias and a residual of that shape. `fixed`: see tile_product."""
    rows, (n, k) = len(x), weight.weight.shape
    depth = DEPTH_BYTES // x.itemsize
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    tiling = tile_product(rows, n, k, fixed=fixed)
    return launch(
        _dense,
        (x, weight.weight),
        weight.bias,
        residual,
        out,
        tiling,
        (k, x.stride(0), tiling.span(k, depth)),
        PRECISION=precision(x.dtype),
        DEPTH=depth,
    )


@triton.jit(do_not_specialize=["rows"])
def _dense(
    x,
    weight,
    bias,
    residual,
    out,
    sums,
    arrivals,
    rows,
    n,
    width,
    k,
    stride,
    span,  # length of a part of k
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    JOIN: tl.constexpr,
    OVERLAP: tl.constexpr,
    PRECISION: tl.constexpr,
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
    lines = x + row.to(tl.int64)[:, None] * stride
    columns = weight + column.to(tl.int64)[None, :] * k
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(part * span, tl.minimum(part * span + span, k), DEPTH):
        at = start + tl.arange(0, DEPTH)
        left = tl.load(lines + at[None, :], mask=real[:, None] & (at < k)[None, :], other=0.0)
        right = tl.load(columns + at[:, None], mask=within[None, :] & (at < k)[:, None], other=0.0)
        product = tl.dot(left, right, product, input_precision=PRECISION)
    store_product(
        product, out, sums, arrivals, row, column, rows, n, width, bias, residual, HAS_BIAS, HAS_RESIDUAL, PARTS, JOIN
    )
