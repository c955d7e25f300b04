"""The launch of a product, the bias and residual that are added to it, and the sum of parts if k was divided among
programs."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.tiles import ProductTiling

COLUMNS = 512


def launch(
    kernel: Any,
    operands: Sequence[Tensor | None],
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    tiling: ProductTiling,
    sizes: Sequence[int],
    **constants: Any,
) -> Tensor:
    """`out` [rows, n], filled by a product's kernel with this tiling, plus bias [n] and residual [rows, n].

    `out` may be columns of a wider tensor; the residual's row stride is that of `out`. The kernel takes its operands,
    bias, residual, output, rows, n, the output's row stride, and the `sizes` of its own.
    """
    rows, n = out.shape
    if not rows:
        return out
    whole = tiling.parts == 1
    product = out if whole else torch.empty(tiling.parts, rows, n, dtype=torch.float32, device=out.device)
    kernel[(*tiling.tiles, tiling.parts)](
        *operands,
        bias,
        residual,
        product,
        rows,
        n,
        product.stride(-2),
        *sizes,
        HAS_BIAS=whole and bias is not None,
        HAS_RESIDUAL=whole and residual is not None,
        ROWS=tiling.tile.rows,
        COLUMNS=tiling.tile.columns,
        num_warps=tiling.tile.warps,
        num_stages=tiling.tile.stages,
        **constants,
    )
    return out if whole else _add_parts(product, bias, residual, out)


def _add_parts(parts: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Tensor:
    """Sum fp32 [parts, rows, n] in order into `out` [rows, n], and add bias [n] and residual [rows, n]."""
    count, rows, n = parts.shape
    _sum_parts[(rows, triton.cdiv(n, COLUMNS))](
        parts,
        bias,
        residual,
        out,
        rows,
        n,
        out.stride(0),
        PARTS=count,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return out


@triton.jit
def finish(product, row, column, rows, n, width, bias, residual, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Returns fp32 [row, column] plus bias and residual. `width` is the residual's row stride."""
    if HAS_BIAS:
        product += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        where = row.to(tl.int64)[:, None] * width + column[None, :]
        inside = (row < rows)[:, None] & (column < n)[None, :]
        product += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    return product


@triton.jit
def store_product(
    product, out, row, column, part, rows, n, width, bias, residual, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    """Stores fp32 [row, column] of a part, plus bias and residual, at its place in `out` [parts, rows, width]."""
    product = finish(product, row, column, rows, n, width, bias, residual, HAS_BIAS, HAS_RESIDUAL)
    target = out + (part.to(tl.int64) * rows + row.to(tl.int64))[:, None] * width + column[None, :]
    tl.store(target, product.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _sum_parts(
    parts,
    bias,
    residual,
    out,
    rows,
    n,
    width,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    where = row.to(tl.int64)[:, None] * n + column[None, :]
    inside = (column < n)[None, :]
    total = tl.zeros([1, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + rows.to(tl.int64) * n * part + where, mask=inside, other=0.0)
    total = finish(total, row, column, rows, n, width, bias, residual, HAS_BIAS, HAS_RESIDUAL)
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)
