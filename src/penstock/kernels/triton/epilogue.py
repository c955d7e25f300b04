"""The launch of a product, the bias and residual that are added to it, and the sum of parts if k was divided among
programs."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.overlap import await_inputs, overlap
from penstock.kernels.triton.tiles import ProductTiling

COLUMNS = 512
# The last program of a tile of so many rows adds its parts. With larger tiles another kernel does it sooner.
JOINED_ROWS = 32
JOINED_TILES = 1 << 12  # more than a product of such tiles has whose k is divided


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
    bias, residual, output, memory for the sums of parts, how many of them each tile has, rows, n, the output's row
    stride, and the `sizes` of its own.
    """
    rows, n = out.shape
    if not rows:
        return out
    sums = torch.empty(tiling.parts, rows, n, dtype=torch.float32, device=out.device) if tiling.parts > 1 else None
    join = sums is not None and tiling.tile.rows <= JOINED_ROWS
    whole = sums is None or join
    kernel[(*tiling.tiles, tiling.parts)](
        *operands,
        bias,
        residual,
        out,
        sums,
        _arrivals(out.device) if join else None,
        rows,
        n,
        out.stride(-2),
        *sizes,
        HAS_BIAS=whole and bias is not None,
        HAS_RESIDUAL=whole and residual is not None,
        PARTS=tiling.parts if whole else 0,
        JOIN=join,
        ROWS=tiling.tile.rows,
        COLUMNS=tiling.tile.columns,
        num_warps=tiling.tile.warps,
        num_stages=tiling.tile.stages,
        **overlap(),
        **constants,
    )
    return out if sums is None or join else _add_parts(sums, bias, residual, out)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Returns the number of parts that each tile has stored: 0 between kernels."""
    return torch.zeros(JOINED_TILES, dtype=torch.int32, device=device)


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
        **overlap(),
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
    product,
    out,
    sums,
    arrivals,
    row,
    column,
    rows,
    n,
    width,
    bias,
    residual,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    JOIN: tl.constexpr,
):
    """Stores fp32 [row, column], plus bias and residual, at its place in `out` [rows, width]. If k is divided, stores
    it in `sums` [parts, rows, n] instead. With JOIN, the last program of a tile then adds all PARTS in order."""
    inside = (row < rows)[:, None] & (column < n)[None, :]
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    if PARTS == 1:
        product = finish(product, row, column, rows, n, width, bias, residual, HAS_BIAS, HAS_RESIDUAL)
        tl.store(target, product.to(out.dtype.element_ty), mask=inside)
    else:
        own = sums + row.to(tl.int64)[:, None] * n + column[None, :]
        size = rows.to(tl.int64) * n
        tl.store(own + tl.program_id(2) * size, product, mask=inside)
        if JOIN:
            tl.debug_barrier()  # the whole part is stored before it is counted
            arrived = arrivals + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            if tl.atomic_add(arrived, 1) == PARTS - 1:
                tl.store(arrived, 0)
                total = tl.zeros(product.shape, tl.float32)
                for part in tl.static_range(PARTS):
                    # Other multiprocessors wrote these, so they are read past this one's cache.
                    total += tl.load(own + part * size, mask=inside, other=0.0, cache_modifier=".cg")
                total = finish(total, row, column, rows, n, width, bias, residual, HAS_BIAS, HAS_RESIDUAL)
                tl.store(target, total.to(out.dtype.element_ty), mask=inside)


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
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
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
