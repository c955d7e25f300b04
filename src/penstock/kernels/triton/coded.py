"""Products of float activations with codes of 4 or 8 bits. The codes are widened to the activations' dtype right before
tensor cores multiply them. weights.py describes the layout: codes are read in runs of 2 HALF values along k."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.config.weights import TABLES, WIDENED_BYTES, WIDENED_ROWS
from penstock.kernels.triton.epilogue import launch, store_product
from penstock.kernels.triton.overlap import await_inputs, overlap
from penstock.kernels.triton.tiles import TILES, Tile, precision, tile_product
from penstock.kernels.triton.weights import CodedWeight

ROW_RUNS = 16  # runs of an embedding's row that one program of `_rows` writes
WIDE_COLUMNS = 128  # columns that one program of `_widened` writes
FEW = Tile(16, 64, 4, 3, waves=4)  # widening the codes takes longer than reading them, so many programs do it
NIBBLE_TILES = {16: FEW, 32: FEW._replace(rows=32), 64: TILES[64], 128: TILES[128]}
BYTE_TILES = {**NIBBLE_TILES, 64: TILES[64]._replace(columns=64)}


def coded_linear(
    x: Tensor,
    weight: CodedWeight,
    residual: Tensor | None,
    dtype: torch.dtype,
    *,
    fixed: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the product of x [rows, k], [rows, n] in the dtype, plus the bias and a residual [rows, n]. `fixed`: see
    tile_product. `out`, if given, gets the product. It may be columns of a wider tensor, then without a residual."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    rows, (n, k) = len(x), weight.shape
    if out is None:
        out = torch.empty(rows, n, dtype=dtype, device=x.device)
    if rows >= WIDENED_ROWS and not fixed and x.itemsize == 2:
        return _by_library(x, weight, residual, out)
    choices = NIBBLE_TILES if weight.format.bits == 4 else BYTE_TILES
    tiling = tile_product(rows, n, k, choices, fixed=fixed)
    return launch(
        _coded,
        (x, weight.codes, *weight.factors),
        weight.bias,
        residual,
        out,
        tiling,
        (k, x.stride(0), tiling.span(weight.runs, 1), weight.runs),
        PRECISION=precision(x.dtype),
        **constants(weight),
    )


def _by_library(x: Tensor, weight: CodedWeight, residual: Tensor | None, out: Tensor) -> Tensor:
    """`coded_linear` for many rows: widens a slice of the weight's columns, and cuBLAS multiplies with it."""
    n, k = weight.shape
    most = max(WIDENED_BYTES // (k * x.itemsize) // WIDE_COLUMNS, 1) * WIDE_COLUMNS
    each = triton.cdiv(triton.cdiv(n, triton.cdiv(n, most)), WIDE_COLUMNS) * WIDE_COLUMNS
    scratch = x.new_empty(k * min(each, n))
    for first in range(0, n, each):
        count = min(each, n - first)
        values = scratch[: k * count].view(k, count)
        _widened[(weight.runs, triton.cdiv(count, WIDE_COLUMNS))](
            weight.codes,
            *weight.factors,
            values,
            first,
            count,
            n,
            k,
            COLUMNS=WIDE_COLUMNS,
            **constants(weight),
            num_warps=4,
            **overlap(),
        )
        columns = out[:, first : first + count]
        if out.dtype == x.dtype and residual is not None:
            torch.addmm(residual[:, first : first + count], x, values, out=columns)
        elif out.dtype == x.dtype:
            torch.mm(x, values, out=columns)
        elif x.is_cuda:
            columns.copy_(torch.mm(x, values, out_dtype=out.dtype))
        else:
            columns.copy_(x.to(out.dtype) @ values.to(out.dtype))
    if residual is not None and out.dtype != x.dtype:
        out.add_(residual)
    return out if weight.bias is None else out.add_(weight.bias)


def coded_rows(token_ids: Tensor, weight: CodedWeight, dtype: torch.dtype, first: int) -> Tensor:
    """Returns the weight's rows [tokens, k] of token_ids [tokens] in the dtype. Its row 0 belongs to token `first`.
    Tokens that have no row get zeros."""
    n, k = weight.shape
    out = torch.empty(len(token_ids), k, dtype=dtype, device=token_ids.device)
    if len(out):
        grid = len(out), triton.cdiv(weight.runs, ROW_RUNS)
        own = token_ids.contiguous()
        _rows[grid](
            own, weight.codes, *weight.factors, out, first, n, k, RUNS=ROW_RUNS, **constants(weight), num_warps=4
        )
    return out


def constants(weight: CodedWeight) -> dict[str, Any]:
    """Returns the constants that the kernels are compiled for. TABLE is a format's 16 values, each plus 128, as one
    number of 16 bytes with the first value in the lowest one; 0 if the codes are numbers themselves."""
    fmt = weight.format
    table = bytes(value + 128 for value in TABLES.get(fmt.codes, ()))
    return {
        "HALF_BYTES": fmt.bits == 4,
        "TABLE": int.from_bytes(table, "little"),
        "ZERO": 128 if table else fmt.zero,
        "GROUP": fmt.group,
        "HALF": weight.half,
    }


@triton.jit
def load_run(lines, run, real, k, HALF: tl.constexpr):
    """Returns x for the two halves of a run, [rows, HALF] each. `lines` are the addresses of the rows of x; `real` says
    which rows exist."""
    at = run * (2 * HALF) + tl.arange(0, HALF)
    low = tl.load(lines + at[None, :], mask=real[:, None] & (at < k)[None, :], other=0.0)
    high = tl.load(lines + (at + HALF)[None, :], mask=real[:, None] & (at + HALF < k)[None, :], other=0.0)
    return low, high


@triton.jit
def add_run(
    sums,
    low,  # see load_run
    high,
    codes,
    scales,
    super_scales,
    mins,
    super_mins,
    run,
    width,  # columns of the weight
    column,
    within,  # which columns exist
    HALF_BYTES: tl.constexpr,
    TABLE: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns `sums` plus the products along k of a run: 2 HALF values."""
    at = run * (HALF if HALF_BYTES else 2 * HALF) + tl.arange(0, HALF)
    place = codes + at.to(tl.int64)[:, None] * width + column[None, :]
    first = tl.load(place, mask=within[None, :], other=0)
    if HALF_BYTES:
        second = first >> 4
        first = first & 15
    else:
        second = tl.load(place + HALF * width, mask=within[None, :], other=0)
    group = run * 2 * HALF // GROUP
    scale, least = _load_group(scales, super_scales, mins, super_mins, group, width, column, within, GROUP=GROUP)
    values = _widen(first, scale, least, mins is not None, TABLE, ZERO, low.dtype)
    sums = tl.dot(low, values, sums, input_precision=PRECISION)
    if GROUP == HALF:
        scale, least = _load_group(
            scales, super_scales, mins, super_mins, group + 1, width, column, within, GROUP=GROUP
        )
    values = _widen(second, scale, least, mins is not None, TABLE, ZERO, low.dtype)
    return tl.dot(high, values, sums, input_precision=PRECISION)


@triton.jit
def _load_half(codes, run, half: tl.constexpr, width, column, within, HALF_BYTES: tl.constexpr, HALF: tl.constexpr):
    """Returns the codes [HALF, places] of one half of a run, for each place of `run`, `column` and `within`."""
    if HALF_BYTES:
        line = run[None, :] * HALF + tl.arange(0, HALF)[:, None]
    else:
        line = run[None, :] * (2 * HALF) + half * HALF + tl.arange(0, HALF)[:, None]
    found = tl.load(codes + line.to(tl.int64) * width + column[None, :], mask=within[None, :], other=0)
    return (found >> (4 * half)) & 15 if HALF_BYTES else found


@triton.jit
def _load_group(scales, super_scales, mins, super_mins, group, width, column, within, GROUP: tl.constexpr):
    """Returns (scale, minimum) [columns] of a group in fp32. The minimum is 0.0 if the format has none."""
    place = group.to(tl.int64) * width + column
    super_place = (group * GROUP // 256).to(tl.int64) * width + column
    scale = tl.load(scales + place, mask=within, other=0).to(tl.float32)
    if super_scales is not None:
        scale *= tl.load(super_scales + super_place, mask=within, other=0.0).to(tl.float32)
    least = 0.0
    if mins is not None:
        least = tl.load(mins + place, mask=within, other=0).to(tl.float32)
        if super_mins is not None:
            least *= tl.load(super_mins + super_place, mask=within, other=0.0).to(tl.float32)
    return scale, least


@triton.jit
def _widen(codes, scale, least, HAS_MINS: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the values of codes [HALF, columns]. They are computed in fp32 and rounded once to the dtype.

    The bits of 256 in fp32, with a code in the first eight bits of the mantissa, are the bits of 256 + code. This
    avoids conversions from integers, which are slow on a multiprocessor.
    """
    codes = codes.to(tl.uint32)
    if TABLE != 0:
        low = tl.full([1, 1], TABLE & 0xFFFFFFFFFFFFFFFF, tl.uint64)
        high = tl.full([1, 1], TABLE >> 64, tl.uint64)
        codes = (tl.where(codes < 8, low, high) >> ((codes & 7) * 8).to(tl.uint64)).to(tl.uint32) & 255
    signed = (codes << 15 | 0x43800000).to(tl.float32, bitcast=True) - (256.0 + ZERO)
    values = signed * scale[None, :]
    if HAS_MINS:
        values += least[None, :]
    return values.to(DTYPE)


@triton.jit(do_not_specialize=["first"])
def _rows(
    token_ids,
    codes,
    scales,
    super_scales,
    mins,
    super_mins,
    out,
    first,
    n,
    k,
    HALF_BYTES: tl.constexpr,
    TABLE: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Each program writes RUNS runs of one token's row, as a tile [HALF, RUNS] for each half."""
    token = tl.load(token_ids + tl.program_id(0)) - first
    exists = (token >= 0) & (token < n)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    line = out + tl.program_id(0).to(tl.int64) * k
    column = tl.zeros([RUNS], tl.int64) + token
    within = exists & (run * (2 * HALF) < k)
    for half in tl.static_range(2):
        at = run[None, :] * (2 * HALF) + half * HALF + tl.arange(0, HALF)[:, None]
        of_half = _load_half(codes, run, half, n, column, within, HALF_BYTES, HALF)
        group = (run * (2 * HALF) + half * HALF) // GROUP
        scale, least = _load_group(scales, super_scales, mins, super_mins, group, n, token, within, GROUP=GROUP)
        values = _widen(of_half, scale, least, mins is not None, TABLE, ZERO, out.dtype.element_ty)
        tl.store(line + at, values, mask=at < k)


@triton.jit
def _widened(
    codes,
    scales,
    super_scales,
    mins,
    super_mins,
    out,
    first,
    count,
    n,
    k,
    HALF_BYTES: tl.constexpr,
    TABLE: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program writes the values of one run in some columns to out [k, count], whose first column is the weight's
    column `first`."""
    await_inputs(OVERLAP)
    run = tl.program_id(0)
    own = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column, within = first + own, own < count
    runs = tl.zeros([COLUMNS], tl.int32) + run
    for half in tl.static_range(2):
        at = run * (2 * HALF) + half * HALF + tl.arange(0, HALF)
        of_half = _load_half(codes, runs, half, n, column, within, HALF_BYTES, HALF)
        group = (run * (2 * HALF) + half * HALF) // GROUP
        scale, least = _load_group(scales, super_scales, mins, super_mins, group, n, column, within, GROUP=GROUP)
        values = _widen(of_half, scale, least, mins is not None, TABLE, ZERO, out.dtype.element_ty)
        target = out + at.to(tl.int64)[:, None] * count + own[None, :]
        tl.store(target, values, mask=within[None, :] & (at < k)[:, None])


@triton.jit(do_not_specialize=["rows", "span", "runs"])
def _coded(
    x,
    codes,
    scales,
    super_scales,
    mins,
    super_mins,
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
    span,  # runs per part of k
    runs,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    JOIN: tl.constexpr,
    OVERLAP: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    TABLE: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program computes one tile of the product over one part of k."""
    await_inputs(OVERLAP, EARLY=False)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    real = row < rows
    within = column < n
    lines = x + row.to(tl.int64)[:, None] * stride
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for run in range(part * span, tl.minimum(part * span + span, runs)):
        low, high = load_run(lines, run, real, k, HALF)
        product = add_run(
            product,
            low,
            high,
            codes,
            scales,
            super_scales,
            mins,
            super_mins,
            run,
            n,
            column,
            within,
            HALF_BYTES=HALF_BYTES,
            TABLE=TABLE,
            ZERO=ZERO,
            GROUP=GROUP,
            HALF=HALF,
            PRECISION=PRECISION,
        )
    store_product(
        product, out, sums, arrivals, row, column, rows, n, width, bias, residual, HAS_BIAS, HAS_RESIDUAL, PARTS, JOIN
    )
