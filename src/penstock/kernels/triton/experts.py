"""Mixtures of experts: products of tiles of rows with the matrix of each tile's expert, and their weighted sum."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.routing import Aside, Routing
from penstock.kernels.triton.gate import activate
from penstock.kernels.triton.routing import Sorted, route, sort_by_expert
from penstock.kernels.triton.tiles import Tile

# By how many rows an expert has on average. A tile's matrix is read for it alone: small tiles while rows are few.
TILES = {8: Tile(16, 64, 4, 4), 32: Tile(32, 64, 4, 4), 128: Tile(64, 128, 4, 4)}
LARGE = Tile(128, 128, 8, 3)
DEPTH = 64  # of a tile along k
COLUMNS = 1024  # of a sum


@dataclass(frozen=True)
class ExpertStack:
    """Matrices of one shape."""

    weight: Tensor  # [experts, out, in]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class TritonExperts:
    """Provides Experts (see kernels/moe.py), of weights in the activations' dtype."""

    def pack(self, weight: Tensor | ExpertStack, count: int, *, gated: bool = False) -> ExpertStack:
        if isinstance(weight, ExpertStack):
            return weight
        return ExpertStack(weight.unflatten(0, (count, -1)).contiguous())

    def route(self, logits: Tensor, slots: int, *, normalize: bool) -> Routing:
        return route(logits.contiguous(), slots, normalize=normalize)

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: ExpertStack,
        down: ExpertStack,
        activation: str,
        *,
        first: int = 0,
        aside: Aside | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(x)
        if not len(x):
            return out
        count = len(gate_up.weight)
        assignments = routing.experts.numel()
        tile = next((tile for most, tile in TILES.items() if assignments <= most * count), LARGE)
        tiles = sort_by_expert(routing.experts, first, count, tile.rows)
        slots = routing.experts.shape[1]
        inner = x.new_empty(assignments, down.weight.shape[2])
        outputs = x.new_empty(assignments, x.shape[1])
        _multiply(x, gate_up, inner, tiles, tile, activation=activation, slots=slots)
        _multiply(inner, down, outputs, tiles, tile)
        _join[(len(x), triton.cdiv(x.shape[1], COLUMNS))](
            outputs,
            routing.experts,
            routing.weights,
            None if aside is None else aside.output,
            None if aside is None else aside.gate,
            residual,
            out,
            x.shape[1],
            first,
            count,
            SLOTS=slots,
            HAS_ASIDE=aside is not None,
            HAS_GATE=aside is not None and aside.gate is not None,
            HAS_RESIDUAL=residual is not None,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
        return out


def _multiply(
    x: Tensor, stack: ExpertStack, out: Tensor, tiles: Sorted, tile: Tile, *, activation: str = "", slots: int = 1
) -> None:
    """Rows of `out`, one for each assignment, from those of x, of which `slots` assignments share one."""
    _, n, k = stack.weight.shape
    columns = out.shape[1]
    # A gated product has two sums.
    width = tile.columns // 2 if activation else tile.columns
    _grouped[(len(tiles.experts), triton.cdiv(columns, width))](
        x,
        stack.weight,
        out,
        tiles.order,
        tiles.experts,
        n,
        k,
        columns,
        ACTIVATION=activation,
        SLOTS=slots,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ROWS=tile.rows,
        COLUMNS=width,
        DEPTH=DEPTH,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def _grouped(
    x,
    weight,
    out,
    order,
    experts,
    n,
    k,
    columns,
    ACTIVATION: tl.constexpr,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of one expert's rows and some columns to a program. Neighbouring programs share the expert's columns."""
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    dtype = x.dtype.element_ty
    assignment = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = assignment >= 0
    within = column < columns
    lines = x + (assignment // SLOTS)[:, None] * k
    matrix = weight + (expert * n + column.to(tl.int64))[None, :] * k
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    others = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, DEPTH):
        at = start + tl.arange(0, DEPTH)
        left = tl.load(lines + at[None, :], mask=real[:, None] & (at < k)[None, :], other=0.0)
        readable = within[None, :] & (at < k)[:, None]
        right = tl.load(matrix + at[:, None], mask=readable, other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
        if ACTIVATION != "":
            gated = tl.load(matrix + columns.to(tl.int64) * k + at[:, None], mask=readable, other=0.0)
            others = tl.dot(left, gated, others, input_precision=PRECISION)
    if ACTIVATION != "":
        sums = activate(sums.to(dtype).to(tl.float32), others.to(dtype).to(tl.float32), ACTIVATION, dtype)
    target = out + assignment[:, None] * columns + column[None, :]
    tl.store(target, sums.to(dtype), mask=real[:, None] & within[None, :])


@triton.jit(do_not_specialize=["first"])
def _join(
    outputs,
    experts,
    weights,
    aside,
    gate,
    residual,
    out,
    width,
    first,
    count,
    SLOTS: tl.constexpr,
    HAS_ASIDE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A token's outputs, weighted and added in the order of its slots, and what joins them."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in range(SLOTS):
        assignment = token * SLOTS + slot
        expert = tl.load(experts + assignment) - first
        here = (expert >= 0) & (expert < count)
        part = tl.load(outputs + assignment * width + column, mask=inside & here, other=0.0).to(tl.float32)
        total += part * tl.load(weights + assignment)
    if HAS_ASIDE:
        part = tl.load(aside + token * width + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            part *= tl.sigmoid(tl.load(gate + token))
        total += part
    if HAS_RESIDUAL:
        total += tl.load(residual + token * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
