"""Memory for packed weights."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 64 << 20  # bytes
ALIGNMENT = 64  # a cache line


class WeightMemory:
    """Hands out memory in large contiguous pieces. One thread calls.

    It comes from NumPy, which asks for huge pages: a pass over all weights then costs hundreds of entries in the TLB,
    not hundreds of thousands. What is handed out becomes resident when it is first written, and stays until the last
    tensor of its piece is gone.
    """

    def __init__(self, first: NDArray[np.uint8] | None = None) -> None:
        """`first` is handed out before any other; its end is left unused where what is next does not fit."""
        self._free = torch.empty(0, dtype=torch.uint8) if first is None else torch.from_numpy(first)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        padding = -self._free.data_ptr() % ALIGNMENT
        if len(self._free) < padding + size:
            self._free = torch.from_numpy(np.empty(max(CHUNK, size + ALIGNMENT), np.uint8))
            padding = -self._free.data_ptr() % ALIGNMENT
        taken, self._free = self._free[padding : padding + size], self._free[padding + size :]
        return taken.view(dtype).view(shape)
