"""The routing of tokens to experts, and tokens sorted by expert, in tiles of rows that share a matrix."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.routing import Routing

LOGITS = 1024  # per program
ASSIGNMENTS = 1024  # per iteration


def route(logits: Tensor, slots: int, *, normalize: bool) -> Routing:
    """See Experts.route (kernels/moe.py)."""
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, slots, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, slots, dtype=torch.float32, device=logits.device)
    if tokens:
        columns = triton.next_power_of_2(experts)
        rows = max(LOGITS // columns, 1)
        _route[(triton.cdiv(tokens, rows),)](
            logits,
            chosen,
            weights,
            tokens,
            experts,
            SLOTS=slots,
            NORMALIZE=normalize,
            ROWS=rows,
            COLUMNS=columns,
            WIDTH=triton.next_power_of_2(slots),
            num_warps=4,
        )
    return Routing(chosen, weights)


@dataclass(frozen=True)
class SortedAssignments:
    """Assignments of tokens to experts, numbered token * slots + slot and sorted by expert. Each expert has whole
    tiles."""

    order: Tensor  # int32 [tiles * rows per tile]: assignments; -1: none
    experts: Tensor  # int32 [tiles]: the expert of each, counted from the first of this rank; -1: the tile is empty


def sort_by_expert(experts: Tensor, first: int, count: int, rows: int) -> SortedAssignments:
    """Sort the assignments to experts `first` to `first` + `count` - 1, of int64 experts [tokens, slots], into tiles.

    The number of tiles is an upper bound, as only the device has the exact number.
    """
    assignments = experts.numel()
    tiles = min(triton.cdiv(assignments, rows) + count, assignments)
    order = torch.full((tiles * rows,), -1, dtype=torch.int32, device=experts.device)
    of_tile = torch.full((tiles,), -1, dtype=torch.int32, device=experts.device)
    counts = torch.empty(count, dtype=torch.int32, device=experts.device)
    if assignments:
        _count[(count,)](experts, counts, assignments, first, CHUNK=ASSIGNMENTS, num_warps=4)
        _place[(count,)](
            experts,
            counts,
            order,
            of_tile,
            assignments,
            first,
            count,
            TILE=rows,
            COUNTS=triton.next_power_of_2(count),
            CHUNK=ASSIGNMENTS,
            num_warps=4,
        )
    return SortedAssignments(order, of_tile)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits,
    chosen,
    weights,
    tokens,
    experts,
    SLOTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program routes some tokens: slot by slot, it takes the best expert that is left."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)[None, :]
    slot = tl.arange(0, WIDTH)[None, :]
    real = (token < tokens)[:, None]
    left = real & (expert < experts)
    values = tl.load(logits + token[:, None] * experts + expert, mask=left, other=float("-inf"))
    top = tl.max(values, 1)[:, None]
    shares = tl.exp(values - tl.where(top == float("-inf"), 0.0, top))
    mass = tl.sum(shares, 1)[:, None]
    found = tl.zeros([ROWS, WIDTH], tl.int32)
    kept = tl.zeros([ROWS, WIDTH], tl.float32)
    for nth in tl.static_range(SLOTS):
        best = tl.max(tl.where(left, values, float("-inf")), 1)[:, None]
        # The first of equals. If all logits are NaN there is none, and any expert will do.
        place = tl.min(tl.where(left & (values == best), expert, experts - 1), 1)[:, None]
        found = tl.where(slot == nth, place, found)
        kept = tl.where(slot == nth, tl.exp(best - top) / mass, kept)
        left &= expert != place
    if NORMALIZE:
        kept /= tl.sum(kept, 1)[:, None]
    where = token[:, None] * SLOTS + slot
    tl.store(chosen + where, found.to(tl.int64), mask=real & (slot < SLOTS))
    tl.store(weights + where, kept, mask=real & (slot < SLOTS))


@triton.jit(do_not_specialize=["assignments", "first"])
def _count(experts, counts, assignments, first, CHUNK: tl.constexpr):
    """Count the assignments of an expert."""
    own = tl.program_id(0)
    total = tl.zeros([CHUNK], tl.int32)
    for start in range(0, assignments, CHUNK):
        place = start + tl.arange(0, CHUNK)
        expert = tl.load(experts + place, mask=place < assignments, other=-1)
        total += (expert == own + first).to(tl.int32)
    tl.store(counts + own, tl.sum(total, 0))


@triton.jit(do_not_specialize=["assignments", "first"])
def _place(
    experts,
    counts,
    order,
    of_tile,
    assignments,
    first,
    count,
    TILE: tl.constexpr,
    COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write an expert's assignments, in ascending order, to its tiles, which follow those of the experts before it."""
    own = tl.program_id(0)
    each = tl.arange(0, COUNTS)
    tiles = tl.cdiv(tl.load(counts + each, mask=each < count, other=0), TILE)
    before = tl.sum(tl.where(each < own, tiles, 0), 0)
    for tile in range(before, before + tl.sum(tl.where(each == own, tiles, 0), 0)):
        tl.store(of_tile + tile, own)
    placed = before * TILE
    for start in range(0, assignments, CHUNK):
        place = start + tl.arange(0, CHUNK)
        mine = tl.load(experts + place, mask=place < assignments, other=-1) == own + first
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + placed + rank - 1, place, mask=mine)
        placed += tl.sum(mine.to(tl.int32), 0)
