"""Mixtures of experts: products of tiles of rows with the matrix of each tile's expert, and their weighted sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.linear import DenseWeight
from penstock.kernels.moe import route_by_scores
from penstock.kernels.routing import SOFTMAX, Routing, Scoring, SharedExpertOutput
from penstock.kernels.triton.grouped import ExpertStack, multiply
from penstock.kernels.triton.overlap import await_inputs, overlap
from penstock.kernels.triton.routing import route, sort_by_expert
from penstock.kernels.triton.tiles import FIXED, Tile
from penstock.kernels.triton.weights import SingleWeight

# By the average number of rows per expert. A tile's matrix is read for that tile alone, so few rows get small tiles.
TILES = {8: Tile(16, 64, 4, 4), 32: Tile(32, 64, 4, 4), 128: Tile(64, 128, 4, 4)}
LARGE = Tile(128, 128, 8, 3)
COLUMNS = 1024  # per program of the sum


class TritonExperts:
    """Provides Experts (see kernels/moe.py) with gated matrices, for dense weights and for those of weights.py. With
    `fixed`, the bits of a row do not depend on the number of rows."""

    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed = fixed

    def pack(
        self, weight: Tensor | SingleWeight, count: int, bias: Tensor | None = None, *, gated: bool = False
    ) -> ExpertStack:
        if isinstance(weight, Tensor):
            weight = DenseWeight(weight.contiguous(), None)
        return ExpertStack(weight, count, bias)

    def route(
        self,
        logits: Tensor,
        slots: int,
        *,
        normalize: bool,
        scoring: Scoring = SOFTMAX,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Routing:
        if scoring != SOFTMAX or bias is not None or scales is not None:
            return route_by_scores(logits, slots, scoring, bias, scales, normalize=normalize)
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
        shared: SharedExpertOutput | None = None,
        residual: Tensor | None = None,
        weigh_inputs: bool = False,
    ) -> Tensor:
        out = torch.empty_like(x)
        if not len(x):
            return out
        tile = FIXED if self._fixed else _tile(routing.experts.numel(), gate_up.count)
        tiles = sort_by_expert(routing.experts, first, gate_up.count, tile.rows)
        slots, weights = routing.experts.shape[1], routing.weights
        rows, shared_by = x, slots
        if weigh_inputs:
            rows, shared_by = (x[:, None].float() * weights[:, :, None]).to(x.dtype).view(-1, x.shape[1]), 1
            weights = torch.ones_like(weights)
        inner = multiply(rows, gate_up, routing.experts.numel(), tiles, tile, activation=activation, slots=shared_by)
        outputs = multiply(inner, down, len(inner), tiles, tile)
        _join[(len(x), triton.cdiv(x.shape[1], COLUMNS))](
            outputs,
            routing.experts,
            weights,
            None if shared is None else shared.output,
            None if shared is None else shared.gate,
            residual,
            out,
            x.shape[1],
            first,
            gate_up.count,
            SLOTS=slots,
            HAS_SHARED=shared is not None,
            HAS_GATE=shared is not None and shared.gate is not None,
            HAS_RESIDUAL=residual is not None,
            COLUMNS=COLUMNS,
            num_warps=4,
            **overlap(),
        )
        return out


def _tile(assignments: int, count: int) -> Tile:
    return next((tile for most, tile in TILES.items() if assignments <= most * count), LARGE)


@triton.jit(do_not_specialize=["first"])
def _join(
    outputs,
    experts,
    weights,
    shared,
    gate,
    residual,
    out,
    width,
    first,
    count,
    SLOTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program sums some columns of a token: its experts' outputs, weighted and in the order of its slots, then the
    shared expert's output and the residual."""
    await_inputs(OVERLAP)
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
    if HAS_SHARED:
        part = tl.load(shared + token * width + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            part *= tl.sigmoid(tl.load(gate + token))
        total += part
    if HAS_RESIDUAL:
        total += tl.load(residual + token * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
