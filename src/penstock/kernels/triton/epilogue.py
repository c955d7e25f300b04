"""How products end: what is added to them, and the sum of parts where k was divided among programs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 512


def sum_parts(parts: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Tensor:
    """fp32 [parts, rows, n] to `out` [rows, n], in their order, then bias [n] and residual [rows, n]."""
    count, rows, n = parts.shape
    _sum_parts[(rows, triton.cdiv(n, COLUMNS))](
        parts,
        bias,
        residual,
        out,
        rows,
        n,
        PARTS=count,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return out


def empty_parts(parts: int, rows: int, n: int, out: Tensor) -> Tensor:
    """Where a product goes: `out` itself where k is not divided."""
    return out if parts == 1 else torch.empty(parts, rows, n, dtype=torch.float32, device=out.device)


@triton.jit
def finish(product, row, column, rows, n, bias, residual, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """fp32 [row, column] plus what is added to it."""
    if HAS_BIAS:
        product += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        where = row.to(tl.int64)[:, None] * n + column[None, :]
        inside = (row < rows)[:, None] & (column < n)[None, :]
        product += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    return product


@triton.jit(do_not_specialize=["rows"])
def _sum_parts(
    parts,
    bias,
    residual,
    out,
    rows,
    n,
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
    total = finish(total, row, column, rows, n, bias, residual, HAS_BIAS, HAS_RESIDUAL)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)
