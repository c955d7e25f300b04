"""Grids: the values that the codes of a weight stand for, and the search for those with the least error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

TINY = 1e-30  # keeps quotients of weights that are all zero finite
REFINED = 1  # rounds of least squares after each start of a search for scales,
REFINED_RANGES = 2  # and of one for ranges


@dataclass(frozen=True)
class Grid:
    """The values of codes: scale * (code - zero) + minimum, for each group of `group` columns of a row.

    Codes are whole numbers from `low` to `high` or, with `float8`, numbers of FP8 (E4M3).
    """

    group: int
    low: int
    high: int
    scale: Tensor  # fp32 [rows, groups]
    zero: Tensor | None = None  # the same, whole numbers
    minimum: Tensor | None = None  # the same
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # what a file stores of scale and minimum, by rows
    float8: bool = False

    def codes(self, weights: Tensor, first: int = 0) -> Tensor:
        """Returns the codes nearest to fp32 weights [rows, columns], which begin with column `first`. Codes are fp32,
        too. The columns are whole groups, or lie in one."""
        scale, zero, minimum = self._of(weights.shape[1], first)
        scaled = weights if minimum is None else weights - minimum
        scaled = torch.where(scale == 0, 0.0, scaled / scale)
        if self.float8:
            return scaled.clamp(self.low, self.high).to(torch.float8_e4m3fn).float()
        return (scaled if zero is None else scaled + zero).round().clamp(self.low, self.high)

    def values(self, codes: Tensor, first: int = 0) -> Tensor:
        """Returns the values of codes, as `codes` returned them."""
        scale, zero, minimum = self._of(codes.shape[1], first)
        values = scale * (codes if zero is None else codes - zero)
        return values if minimum is None else values + minimum

    def rows(self, index: Tensor) -> "Grid":
        """Returns the grid of other rows: an index for each."""
        zero, minimum = (None if each is None else each[index] for each in (self.zero, self.minimum))
        parts = {name: part[index] for name, part in self.parts.items()}
        return replace(self, scale=self.scale[index], zero=zero, minimum=minimum, parts=parts)

    def _of(self, columns: int, first: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns scale, zero and minimum for each column, or one for all columns where they lie in one group."""
        begin, end = first // self.group, -(-(first + columns) // self.group)
        each = [None if t is None else t[:, begin:end] for t in (self.scale, self.zero, self.minimum)]
        if end - begin > 1:
            each = [None if t is None else t.repeat_interleave(self.group, 1) for t in each]
        assert each[0] is not None
        return each[0], each[1], each[2]


def joined_grids(grids: Sequence[Grid], dim: int) -> Grid:
    """Returns the grid of weights side by side (`dim` 1) or below each other (0)."""

    def cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(found, dim) if found else None

    scale = torch.cat([grid.scale for grid in grids], dim)
    parts = {name: torch.cat([grid.parts[name] for grid in grids], dim) for name in grids[0].parts}
    zero, minimum = cat([grid.zero for grid in grids]), cat([grid.minimum for grid in grids])
    return replace(grids[0], scale=scale, zero=zero, minimum=minimum, parts=parts)


@dataclass(frozen=True)
class Quantized:
    """A weight as codes on a grid, rows below each other."""

    codes: Tensor  # fp32 [rows, columns]
    grid: Grid

    @property
    def values(self) -> Tensor:
        return self.grid.values(self.codes)

    def rows(self, index: Tensor) -> "Quantized":
        return Quantized(self.codes[index], self.grid.rows(index))


class CodeFormat(Protocol):
    """A way to quantise the rows of a matrix."""

    @property
    def span(self) -> int:
        """The columns whose grid depends on no others; 0: all columns of a row."""

    def fit(self, weights: Tensor, importance: Tensor | None, *, search: bool) -> Grid:
        """Returns a grid for fp32 weights [rows, columns], whole spans. With `search` it has the least squared error
        that was found, in which `importance` [columns] weighs columns; without, it spans the weights' range."""


def search_scales(x: Tensor, importance: Tensor | None, low: int, high: int, ratios: Sequence[float]) -> Tensor:
    """Returns the scale of each group of x [rows, groups, group] with the least squared error, [rows, groups].

    The search begins with scales for which the largest value is low * ratio, then improves each by least squares: with
    given codes, the best scale is sum(x code) / sum(code^2). A scale may be negative: then the longer side of the
    codes, which is the negative one, holds the largest value, as in llama.cpp's Q4_0. `importance` [groups, group].
    """
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best = torch.where(largest == 0, 1.0, largest / low)
    least = torch.full_like(best, torch.inf)
    weighed = x if importance is None else x * importance
    for ratio in ratios:
        for sign in (1.0, -1.0):
            scale = torch.where(largest == 0, 1.0, largest / (low * ratio * sign))
            for last in (*[False] * REFINED, True):
                codes = (x / scale[..., None]).round_().clamp_(low, high)
                square = codes.square() if importance is None else codes.square() * importance
                products, squares = (weighed * codes).sum(-1), square.sum(-1)
                # sum((x - s c)^2) without the constant sum(x^2)
                error = scale * (scale * squares - 2 * products)
                better = error < least
                best, least = torch.where(better, scale, best), torch.where(better, error, least)
                if not last:
                    scale = torch.where(squares > TINY, products / squares.clamp_min(TINY), scale)
    return best


def search_ranges(
    x: Tensor, importance: Tensor | None, high: int, ratios: Sequence[float], *, most: float = torch.inf
) -> tuple[Tensor, Tensor]:
    """Returns (scale, minimum) of each group of x [rows, groups, group] for codes 0 to `high`, with the least squared
    error: value = scale * code + minimum. Minima are at most `most`.

    The search begins with parts of the groups' range, then solves the least squares for scale and minimum with given
    codes, as llama.cpp does for its K types.
    """
    weights = torch.ones_like(x) if importance is None else importance.expand_as(x)
    total, mean = weights.sum(-1), (weights * x).sum(-1)
    lowest, largest = x.amin(-1).clamp_max(most), x.amax(-1)
    least = torch.full_like(lowest, torch.inf)
    best, best_minimum = torch.ones_like(lowest), lowest
    for ratio in ratios:
        minimum, scale = lowest * ratio, ((largest - lowest) * ratio / high).clamp_min(TINY)
        for last in (*[False] * REFINED_RANGES, True):
            codes = ((x - minimum[..., None]) / scale[..., None]).round_().clamp_(0, high)
            error = (weights * (scale[..., None] * codes + minimum[..., None] - x).square_()).sum(-1)
            better = error < least
            best, best_minimum = torch.where(better, scale, best), torch.where(better, minimum, best_minimum)
            least = torch.where(better, error, least)
            if last:
                break
            coded = weights * codes
            sums, squares, products = coded.sum(-1), (coded * codes).sum(-1), (coded * x).sum(-1)
            divisor = total * squares - sums.square()
            fits = divisor > 1e-6 * (total * squares).clamp_min(TINY)
            slope = torch.where(fits, (total * products - sums * mean) / divisor.clamp_min(TINY), scale)
            offset = (mean - slope * sums) / total
            # Where the best minimum is too large, that bound and the best scale for it.
            bounded = torch.where(squares > TINY, (products - most * sums) / squares.clamp_min(TINY), scale)
            slope = torch.where(offset > most, bounded, slope) if most < torch.inf else slope
            scale, minimum = slope.clamp_min(TINY), offset.clamp_max(most)
    return best, best_minimum


def grouped(weights: Tensor, importance: Tensor | None, group: int) -> tuple[Tensor, Tensor | None]:
    """Returns weights [rows, groups, group], and the importance [groups, group] with a mean of 1 in each group."""
    if importance is None:
        return weights.unflatten(1, (-1, group)), None
    each = importance.view(-1, group).clamp_min(TINY)
    return weights.unflatten(1, (-1, group)), each / each.mean(-1, keepdim=True)
