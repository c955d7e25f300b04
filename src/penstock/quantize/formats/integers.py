"""Whole numbers of 2 to 8 bits in groups with a scale and perhaps a zero point; and FP8 with a scale a row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.quantize.formats.grid import Grid, grouped, search_ranges, search_scales

# Of the code for the largest value, over the lowest code: more than 1 leaves codes unused, less cuts values off.
_RATIOS = {8: (1.0, 0.98, 0.95), 4: (0.8, 0.88, 0.96, 1.04, 1.12, 1.2, 1.3)}
_RANGES = {8: (1.0, 0.98), 4: (1.0, 0.92, 0.84, 0.74)}
FP8_LARGEST = 448


@dataclass(frozen=True)
class Integers:
    """Codes of `bits` bits. `group` 0: one scale for a row. `dtype` is that of scales in the file."""

    bits: int
    group: int
    zero_points: bool
    dtype: torch.dtype

    @property
    def span(self) -> int:
        return self.group

    def fit(self, weights: Tensor, importance: Tensor | None, *, search: bool) -> Grid:
        group = self.group or weights.shape[1]
        x, importance = grouped(weights, importance, group)
        kind = 8 if self.bits > 6 else 4
        if self.zero_points:
            return self._with_zeros(x, importance, _RANGES[kind] if search else ())
        half = 1 << self.bits - 1
        if search:
            scale = search_scales(x, importance, -half, half - 1, _RATIOS[kind])
        else:
            scale = x.abs().amax(-1) / (half - 0.5)
        return Grid(group, -half, half - 1, self._stored(scale))

    def _with_zeros(self, x: Tensor, importance: Tensor | None, ranges: tuple[float, ...]) -> Grid:
        high = (1 << self.bits) - 1
        lowest, largest = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
        scale, minimum = (largest - lowest) / high, lowest
        if ranges:
            scale, minimum = search_ranges(x, importance, high, ranges)
        scale = self._stored(scale)
        zero = (-minimum / scale).round().clamp(0, high)
        return Grid(x.shape[-1], 0, high, scale, zero)

    def _stored(self, scale: Tensor) -> Tensor:
        """Returns scales as the file holds them. One that the file's type cannot hold becomes the nearest it can."""
        info = torch.finfo(self.dtype)
        sized = scale.abs().clamp(info.tiny, info.max)
        return torch.where(scale < 0, -sized, sized).to(self.dtype).float()


@dataclass(frozen=True)
class Float8:
    """FP8 (E4M3) codes with a scale for each row, in `dtype`."""

    dtype: torch.dtype
    span = 0

    def fit(self, weights: Tensor, importance: Tensor | None, *, search: bool) -> Grid:
        scale = (weights.abs().amax(1, keepdim=True) / FP8_LARGEST).clamp_min(torch.finfo(self.dtype).tiny)
        stored = scale.to(self.dtype).float()
        return Grid(weights.shape[1], -FP8_LARGEST, FP8_LARGEST, stored, float8=True)
