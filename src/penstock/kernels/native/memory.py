"""Memory for packed weights."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 64 << 20  # bytes
ALIGNMENT = 64  # a cache line


class WeightMemory:
    """Hands out memory in large contiguous pieces. One thread calls.

    It comes from NumPy, which asks for huge pages: a pass over all weights then costs hundreds of entries in the TLB,
    not hundreds of thousands. What is handed out becomes resident when it is first written, and stays until the last
    array of its piece is gone.
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
