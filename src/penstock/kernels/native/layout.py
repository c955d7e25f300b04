"""The sizes and memory of packed weights' parts (see Scheme in cpp/ops.h). Free of torch: weights are read before it is
imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.weights import COLUMNS, LINE_BYTES, VALUES, Scheme, num_blocks, padded_width

Parts = dict[str, NDArray[Any] | None]


@dataclass(frozen=True)
class Layout:
    """The layout of `count` packed weights [n, k], one behind the other."""

    n: int
    k: int
    scheme: Scheme
    group: int
    gated: bool = False
    count: int = 1

    def empty(self, empty: Callable[[tuple[int, ...], Any], NDArray[Any]] = np.empty) -> Parts:
        """Allocate the parts, by name and in the order of `Matrix`. Padding at the end of each weight is zeroed; memory
        that rows will fill is not touched. `empty` allocates an array of a shape and a dtype."""
        blocks, padded = num_blocks(self.n, gated=self.gated), padded_width(self.k, self.scheme, self.group)
        by_column = (self.count, blocks, COLUMNS)
        groups = (self.count, blocks, padded // self.group if self.scheme == "int4" else 0, COLUMNS)
        parts: Parts = {
            "lines": empty((self.count, blocks, padded // VALUES[self.scheme], LINE_BYTES), np.uint8),
            "column_scales": empty(by_column, np.float32) if self.scheme in ("int8", "int16") else None,
            "column_sums": empty(by_column, np.int32) if self.scheme == "int8" else None,
            "group_scales": empty(groups, np.float16) if self.scheme == "int4" else None,
        }
        if self.n % COLUMNS:  # also right for gated weights, whose blocks hold eight rows of each half
            for part in parts.values():
                if part is not None:
                    part[:, -1:] = 0
        return parts
