"""Products of 16-bit activations with int4 weights (W4A16), which are widened before tensor cores multiply them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.epilogue import launch, store_product
from penstock.kernels.triton.tiles import precision, tile_product
from penstock.kernels.triton.weights import Int4Weight

RUN_BYTES = 32  # weights.HALF
COLUMNS = 128  # of a tile: a byte holds two values, so narrower tiles would have too few bytes in flight


def int4_linear(
    x: Tensor, weight: Int4Weight, residual: Tensor | None, dtype: torch.dtype, *, fixed: bool = False
) -> Tensor:
    """x [rows, k] to [rows, n] of the dtype, plus bias and a residual of that shape. `fixed`: see tile_product."""
    rows, (n, k) = len(x), weight.shape
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    tiling, runs = tile_product(rows, n, k, COLUMNS, fixed=fixed), weight.values.shape[0] // RUN_BYTES
    return launch(
        _int4,
        (x, weight.values, weight.scales),
        weight.bias,
        residual,
        out,
        tiling,
        (k, x.stride(0), tiling.span(runs, 2), runs),
        GROUP=weight.group,
        PRECISION=precision(x.dtype),
    )


@triton.jit
def widen(nibbles, scale, DTYPE: tl.constexpr):
    """Values 0 to 15, meaning -8 to 7, times their scale.

    bf16's bits of 128 with v in the last four bits of the mantissa are 128 + v. This avoids conversions from integers,
    which are slow on a multiprocessor. One multiply-add then subtracts 136 and scales.
    """
    shifted = ((nibbles.to(tl.uint32) | 0x4300) << 16).to(tl.float32, bitcast=True)
    return (shifted * scale - 136.0 * scale).to(DTYPE)


@triton.jit(do_not_specialize=["rows", "span", "runs"])
def _int4(
    x,
    values,
    scales,
    bias,
    residual,
    out,
    rows,
    n,
    k,
    stride,
    span,  # runs per part of k
    runs,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program computes one tile of the product over one part of k. A run of 32 bytes is 64 values, two
    products."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    real = row < rows
    within = column < n
    byte = tl.arange(0, 32)
    lines = x + row.to(tl.int64)[:, None] * stride
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for run in range(part * span, tl.minimum(part * span + span, runs)):
        place = values + (run * 32 + byte).to(tl.int64)[:, None] * n + column[None, :]
        pairs = tl.load(place, mask=within[None, :], other=0)
        group = scales + (run * 64 // GROUP) * n + column
        low_scale = tl.load(group, mask=within, other=0.0).to(tl.float32)[None, :]
        if GROUP == 32:
            high_scale = tl.load(group + n, mask=within, other=0.0).to(tl.float32)[None, :]
        else:
            high_scale = low_scale
        at = run * 64 + byte
        low = tl.load(lines + at[None, :], mask=real[:, None] & (at < k)[None, :], other=0.0)
        high = tl.load(lines + (at + 32)[None, :], mask=real[:, None] & (at + 32 < k)[None, :], other=0.0)
        product = tl.dot(low, widen(pairs & 15, low_scale, low.dtype), product, input_precision=PRECISION)
        product = tl.dot(high, widen(pairs >> 4, high_scale, high.dtype), product, input_precision=PRECISION)
    store_product(product, out, row, column, part, rows, n, bias, residual, HAS_BIAS, HAS_RESIDUAL)
