"""Products of tiles of rows, each with the matrix of its own expert: dense, int8, fp8 or codes."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.coded import add_run, constants, load_run
from penstock.kernels.triton.gate import activate
from penstock.kernels.triton.overlap import await_inputs, overlap
from penstock.kernels.triton.quantized import quantize_rows
from penstock.kernels.triton.routing import SortedAssignments
from penstock.kernels.triton.tiles import Tile, precision
from penstock.kernels.triton.weights import CodedWeight, QuantizedWeight, SingleWeight

DEPTH_BYTES = 128  # that an iteration reads along k


@dataclass(frozen=True)
class ExpertStack:
    """Matrices [out, in] of one shape, stacked in one weight [count * out, in]."""

    weight: SingleWeight
    count: int
    bias: Tensor | None = None  # [count * out]

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return n // self.count, k

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def multiply(
    x: Tensor,
    stack: ExpertStack,
    assignments: int,
    tiles: SortedAssignments,
    tile: Tile,
    *,
    activation: str = "",
    slots: int = 1,
) -> Tensor:
    """Returns one row for each assignment of a row of x to an expert. Each row of x has `slots` assignments.

    With an activation, the first half of a matrix's rows is the gate and the second half the up projection. Rows of
    assignments to experts of other ranks are not written. Sums run over all of k in one order, in fp32 (int8: exact).
    For 8-bit matrices x is quantised here.
    """
    weight, (n, k) = stack.weight, stack.shape
    columns = n // 2 if activation else n
    out = x.new_empty(assignments, columns)
    # A gated product has two tiles of sums, so each is half as wide.
    tile = tile._replace(columns=tile.columns // 2) if activation else tile
    grid = len(tiles.experts), triton.cdiv(columns, tile.columns)
    common = {
        "ACTIVATION": activation,
        "BIASED": stack.bias is not None,
        "SLOTS": slots,
        "PRECISION": precision(x.dtype),
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **overlap(),
    }
    if isinstance(weight, CodedWeight):
        operands = x, weight.codes, *weight.factors, stack.bias, out, tiles.order, tiles.experts
        _grouped_codes[grid](*operands, stack.count, n, k, columns, weight.runs, **constants(weight), **common)
        return out
    left, left_scales, right, right_scales = x, None, None, None
    if isinstance(weight, QuantizedWeight):
        right, right_scales = weight.values, weight.scales
        left, left_scales, _ = quantize_rows(x, right.dtype)
    else:
        right = weight.weight
    pointers = left, left_scales, right, right_scales, stack.bias, out, tiles.order, tiles.experts
    scaled, depth = right_scales is not None, DEPTH_BYTES // right.itemsize
    _grouped[grid](*pointers, n, k, columns, SCALED=scaled, DEPTH=depth, **common)
    return out


@triton.jit
def _store(
    out,
    sums,
    up_sums,
    bias,  # of the expert's first column
    assignment,
    column,
    columns,
    row_exists,
    column_exists,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Stores a tile of fp32 sums, or with an activation the gated product of two, in rows of `out`."""
    dtype = out.dtype.element_ty
    if BIASED:
        sums += tl.load(bias + column, mask=column_exists, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            up_sums += tl.load(bias + columns + column, mask=column_exists, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        sums = activate(sums.to(dtype).to(tl.float32), up_sums.to(dtype).to(tl.float32), ACTIVATION, dtype)
    target = out + assignment[:, None] * columns + column[None, :]
    tl.store(target, sums.to(dtype), mask=row_exists[:, None] & column_exists[None, :])


@triton.jit
def _grouped(
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    order,
    experts,
    n,
    k,
    columns,
    SCALED: tl.constexpr,  # whether x and weight have 8-bit values
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program computes a tile: some columns of one expert, for some of its rows."""
    await_inputs(OVERLAP)
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    assignment = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_exists = assignment >= 0
    column_exists = column < columns
    source = assignment // SLOTS
    lines = x + source[:, None] * k
    matrix = weight + (expert * n + column.to(tl.int64))[None, :] * k
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    sums = tl.zeros([ROWS, COLUMNS], kind)
    up_sums = tl.zeros([ROWS, COLUMNS], kind)
    for start in range(0, k, DEPTH):
        at = start + tl.arange(0, DEPTH)
        left = tl.load(lines + at[None, :], mask=row_exists[:, None] & (at < k)[None, :], other=0.0)
        readable = column_exists[None, :] & (at < k)[:, None]
        right = tl.load(matrix + at[:, None], mask=readable, other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION, out_dtype=kind)
        if ACTIVATION != "":
            gated = tl.load(matrix + columns.to(tl.int64) * k + at[:, None], mask=readable, other=0.0)
            up_sums = tl.dot(left, gated, up_sums, input_precision=PRECISION, out_dtype=kind)
    product = sums.to(tl.float32)
    up = up_sums.to(tl.float32)
    if SCALED:
        by_row = tl.load(x_scales + source, mask=row_exists, other=0.0)[:, None]
        by_column = scales + expert * n + column
        product *= by_row * tl.load(by_column, mask=column_exists, other=0.0)[None, :]
        if ACTIVATION != "":
            up *= by_row * tl.load(by_column + columns, mask=column_exists, other=0.0)[None, :]
    first = bias + expert * n if BIASED else bias
    _store(out, product, up, first, assignment, column, columns, row_exists, column_exists, ACTIVATION, BIASED)


@triton.jit(do_not_specialize=["runs"])
def _grouped_codes(
    x,
    codes,
    scales,
    super_scales,
    mins,
    super_mins,
    bias,
    out,
    order,
    experts,
    count,
    n,
    k,
    columns,
    runs,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    SLOTS: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    TABLE: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`_grouped` for codes (see coded.py). All experts' columns lie side by side."""
    await_inputs(OVERLAP, EARLY=False)
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    assignment = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_exists = assignment >= 0
    column_exists = column < columns
    lines = x + (assignment // SLOTS)[:, None] * k
    width = (count * n).to(tl.int64)
    place = expert * n + column
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for run in range(runs):
        low, high = load_run(lines, run, row_exists, k, HALF)
        for half in tl.static_range(2 if ACTIVATION != "" else 1):
            total = add_run(
                up_sums if half else sums,
                low,
                high,
                codes,
                scales,
                super_scales,
                mins,
                super_mins,
                run,
                width,
                place + half * columns,
                column_exists,
                HALF_BYTES=HALF_BYTES,
                TABLE=TABLE,
                ZERO=ZERO,
                GROUP=GROUP,
                HALF=HALF,
                PRECISION=PRECISION,
            )
            if half:
                up_sums = total
            else:
                sums = total
    first = bias + expert * n if BIASED else bias
    _store(out, sums, up_sums, first, assignment, column, columns, row_exists, column_exists, ACTIVATION, BIASED)
