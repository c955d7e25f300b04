"""Memory for packed weights."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 64 << 20  # bytes
ALIGNMENT = 64  # a cache line


class WeightMemory:
    """Allocates arrays from large contiguous chunks. Only one thread may call it.

    Chunks come from NumPy, which requests huge pages: a pass over all weights then needs hundreds of TLB entries
    instead of hundreds of thousands. Memory becomes resident when it is first written. A chunk is freed with its last
    array.
    """

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        padding = -self._free.ctypes.data % ALIGNMENT
        if len(self._free) < padding + size:
            self._free = np.empty(max(CHUNK, size + ALIGNMENT), np.uint8)
            padding = -self._free.ctypes.data % ALIGNMENT
        taken, self._free = self._free[padding : padding + size], self._free[padding + size :]
        array: NDArray[Any] = taken.view(dtype).reshape(shape)
        return array
