"""The block types of GGUF files that are written: their grids, and their bytes.

The layouts are those of ggml-common.h in llama.cpp. Scales of the K types have two levels: a number of 6 or 8 bits for
each group, times an fp16 for 256 values.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gguf import TYPES
from penstock.gguf.dequantize import LAYOUTS
from penstock.quantize.formats.grid import Grid, Quantized, grouped, search_ranges, search_scales

_RATIOS = (0.8, 0.88, 0.96, 1.04, 1.12, 1.2, 1.3)
_FINE = (1.0, 0.97, 0.94)  # for codes of 6 bits
_RANGES = (1.0, 0.92, 0.84, 0.74)
_K_GROUPS = {"Q4_K": (32, 15), "Q5_K": (32, 31), "Q6_K": (16, 31)}  # values that share a scale, and the highest code
_HALF_MOST = 65504.0
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Blocks:
    """A block type: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K."""

    name: str

    @property
    def span(self) -> int:
        return TYPES[self.name].block_values

    def fit(self, weights: Tensor, importance: Tensor | None, *, search: bool) -> Grid:
        if self.name == "Q8_0":
            x, _ = grouped(weights, None, 32)
            return Grid(32, -127, 127, _half(x.abs().amax(-1) / 127))
        if self.name in ("Q4_0", "Q5_0"):
            low = -8 if self.name == "Q4_0" else -16
            x, importance = grouped(weights, importance, 32)
            scale = search_scales(x, importance, low, -low - 1, _RATIOS if search else (1.0,))
            return Grid(32, low, -low - 1, _half(scale))
        if self.name in ("Q4_1", "Q5_1"):
            high = 15 if self.name == "Q4_1" else 31
            x, importance = grouped(weights, importance, 32)
            scale, minimum = search_ranges(x, importance, high, _RANGES if search else (1.0,))
            return Grid(32, 0, high, _half(scale), minimum=_half(minimum))
        group, high = _K_GROUPS[self.name]
        x, importance = grouped(weights, importance, group)
        if self.name == "Q6_K":
            scale = search_scales(x, importance, -32, 31, _FINE if search else (1.0,))
            d, scales = _two_levels(scale, 256 // group, 127)
            parts = {"d": d, "scales": scales}
            return Grid(group, -32, 31, d.repeat_interleave(256 // group, 1) * scales, parts=parts)
        scale, minimum = search_ranges(x, importance, high, _RANGES if search else (1.0,), most=0.0)
        d, scales = _two_levels(scale, 8, 63)
        dmin, mins = _two_levels(-minimum, 8, 63)
        parts = {"d": d, "dmin": dmin, "scales": scales, "mins": mins}
        wide = (each.repeat_interleave(8, 1) for each in (d, dmin))
        return Grid(group, 0, high, next(wide) * scales, minimum=-(next(wide) * mins), parts=parts)

    def encode(self, weight: Quantized) -> Bytes:
        """Returns the blocks of a weight, uint8 [rows, bytes of a row]."""
        rows, kind, grid = len(weight.codes), TYPES[self.name], weight.grid
        codes = (weight.codes - (0 if self.name == "Q8_0" else grid.low)).to(torch.int16).numpy()
        blocks = np.zeros(codes.size // kind.block_values, LAYOUTS[self.name])
        codes = codes.reshape(len(blocks), kind.block_values)
        if self.name == "Q8_0":
            blocks["values"] = codes
        elif self.name == "Q6_K":
            blocks["low"] = _packed(codes & 15, 4, 64)
            blocks["high"] = _packed(codes >> 4, 2, 32)
        else:
            blocks["low"] = _packed(codes & 15, 4, 32 if self.name.endswith("_K") else 16)
            if self.name == "Q5_K":
                blocks["high"] = _packed(codes >> 4, 1, 32)
            elif self.name.startswith("Q5"):
                blocks["high"] = _packed(codes >> 4, 1, 1)
        self._put_scales(blocks, grid)
        return blocks.view(np.uint8).reshape(rows, -1)

    def _put_scales(self, blocks: NDArray[np.void], grid: Grid) -> None:
        def flat(tensor: Tensor, width: int) -> NDArray[np.float32]:
            array: NDArray[np.float32] = tensor.reshape(len(blocks), width).numpy()
            return array

        if not grid.parts:
            blocks["d"] = flat(grid.scale, 1)[:, 0]
            if grid.minimum is not None:
                blocks["min"] = flat(grid.minimum, 1)[:, 0]
            return
        blocks["d"] = flat(grid.parts["d"], 1)[:, 0]
        if self.name == "Q6_K":
            blocks["scales"] = flat(grid.parts["scales"], 16)
            return
        blocks["dmin"] = flat(grid.parts["dmin"], 1)[:, 0]
        scales, mins = (flat(grid.parts[name], 8).astype(np.uint8) for name in ("scales", "mins"))
        high = np.concatenate((scales[:, 4:], mins[:, 4:]), 1) >> 4 << 6  # the upper two bits of the last four
        low = scales[:, 4:] & 15 | mins[:, 4:] << 4
        blocks["scales"] = np.concatenate((np.concatenate((scales[:, :4], mins[:, :4]), 1) | high, low), 1)


def _packed(codes: NDArray[np.int16], bits: int, run: int) -> Bytes:
    """Returns codes [n, values] of `bits` bits in bytes: each run of `run` bytes holds that many codes in its lowest
    bits, then as many in the next bits."""
    parts = codes.astype(np.uint8).reshape(len(codes), -1, 8 // bits, run)
    shifted = parts << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(shifted, 2).reshape(len(codes), -1)
    return packed


def _half(values: Tensor) -> Tensor:
    """Returns the nearest values that fp16 holds."""
    return values.clamp(-_HALF_MOST, _HALF_MOST).half().float()


def _two_levels(scales: Tensor, groups: int, most: int) -> tuple[Tensor, Tensor]:
    """Returns (fp16 values [rows, supers], whole numbers [rows, groups] up to `most`) whose products are near `scales`
    [rows, groups]."""
    each = scales.unflatten(1, (-1, groups))
    d = _half(each.abs().amax(-1) / most)
    wide = d.repeat_interleave(groups, 1)
    return d, torch.where(wide == 0, 0.0, (scales / wide).round().clamp(-most, most))
