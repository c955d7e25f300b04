"""Finds, by values, the rotation that turns the query and key heads of a projection into those that attention gets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6}  # as a share of the largest value


@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotation by positions. The kernels rotate element i of a head with element i + head_dim / 2, so `order` are the
    elements of a head in the order that they need."""

    frequencies: Tensor  # fp32 [2, head_dim / 2]: radians per position, and what cosine and sine are multiplied by
    order: Tensor  # int64 [head_dim]

    def turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Returns heads [tokens, heads, head_dim], whose elements are in `order`, rotated, in fp32."""
        angles = positions.float()[:, None, None] * self.frequencies[0]
        cos, sin = angles.cos() * self.frequencies[1], angles.sin() * self.frequencies[1]
        first, second = heads.float().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def explains(self, before: Tensor, after: Tensor, positions: Tensor) -> bool:
        """Whether heads [tokens, heads, head_dim] are rotated as `after`."""
        expected, got = self.turned(before[..., self.order], positions), after[..., self.order].float()
        allowed = TOLERANCE[after.dtype] * float(expected.abs().max())
        return bool(((expected - got).abs() <= allowed).all())  # false for NaN


def without_rotation(head_dim: int) -> Rotary:
    """Returns the rotation by no angle."""
    radians = torch.zeros(head_dim // 2)
    return Rotary(torch.stack((radians, torch.ones_like(radians))), torch.arange(head_dim))


def rotations_of(model: nn.Module, head_dim: int) -> Sequence[Rotary]:
    """Returns the rotations that a model may apply: by the frequencies in its buffers, of halves or of neighbours."""
    found: list[Rotary] = [without_rotation(head_dim)]
    for radians, factor in _frequencies(model, head_dim // 2):
        half, rest = len(radians), head_dim // 2 - len(radians)
        row = torch.stack((F.pad(radians, (0, rest)), F.pad(torch.full((half,), factor), (0, rest), value=1.0)))
        if any(torch.equal(row, each.frequencies) for each in found):
            continue
        places = torch.arange(2 * half)
        left, right = torch.arange(2 * half, head_dim).chunk(2) if rest else (places[:0], places[:0])
        for first, second in ((places[:half], places[half:]), (places[::2], places[1::2])):
            found.append(Rotary(row, torch.cat((first, left, second, right))))
    return found


def _frequencies(model: nn.Module, most: int) -> Iterator[tuple[Tensor, float]]:
    """Radians per position, and the factor of cosine and sine that is kept beside them."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dim() == 1 and buffer.is_floating_point() and 1 < len(buffer) <= most:
                factor = getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0)
                yield buffer.detach().float(), float(factor) if isinstance(factor, int | float) else 1.0
