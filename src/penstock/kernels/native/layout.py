"""The sizes and memory of packed weights' parts (see Format in cpp/ops.h). Free of torch: weights are read before it is
imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.weights import COLUMNS, LINE_BYTES, WeightFormat, num_blocks
from penstock.kernels.native.structs import CODES, SCALES, SCHEMES, Format

Parts = dict[str, NDArray[Any] | None]
_DTYPES = {"f16": np.float16, "f32": np.float32, "two_levels": np.int8, "by_column": np.float16}


@dataclass(frozen=True)
class Layout:
    """The layout of `count` packed weights [n, k], one behind the other."""

    n: int
    k: int
    format: WeightFormat
    gated: bool = False
    count: int = 1

    def empty(self, empty: Callable[[tuple[int, ...], Any], NDArray[Any]] = np.empty) -> Parts:
        """Allocate the parts, by name and in the order of `Matrix`. Padding at the end of each weight is zeroed; memory
        that rows will fill is not touched. `empty` allocates an array of a shape and a dtype."""
        fmt, blocks = self.format, num_blocks(self.n, gated=self.gated)
        by_column = (self.count, blocks, COLUMNS)
        groups = (self.count, blocks, fmt.groups(self.k), COLUMNS)
        supers = (self.count, blocks, fmt.supers(self.k), COLUMNS)
        lines = (self.count, blocks, fmt.padded_width(self.k) // fmt.values, LINE_BYTES)
        shapes: dict[str, tuple[tuple[int, ...], Any] | None] = {
            "lines": (lines, np.uint8),
            "column_scales": (by_column, np.float32) if fmt.column_bytes else None,
            "scales": (groups, _DTYPES[fmt.scales]) if groups[2] else None,
            "mins": (groups, _DTYPES[fmt.scales]) if groups[2] and fmt.mins else None,
            "super_scales": (supers, np.float16) if supers[2] else None,
            "super_mins": (supers, np.float16) if supers[2] and fmt.mins else None,
        }
        parts: Parts = {name: None if shape is None else empty(*shape) for name, shape in shapes.items()}
        if self.n % COLUMNS:  # also right for gated weights, whose blocks hold eight rows of each half
            for part in parts.values():
                if part is not None:
                    part[:, -1:] = 0
        return parts


def native_format(fmt: WeightFormat) -> Format:
    codes, scales = CODES.index(fmt.codes), SCALES.index(fmt.scales)
    return Format(SCHEMES.index(fmt.scheme), codes, scales, fmt.mins, fmt.group, fmt.zero)
