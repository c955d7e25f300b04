"""What a device's memory is used for, as the device itself says."""

import gc
from typing import NamedTuple, Protocol

import torch


class MemoryUsage(NamedTuple):
    """In bytes."""

    total: int  # of the device
    free: int  # nobody's; other processes' memory is not
    held: int  # by this process's allocator: tensors, and what it keeps for others
    tensors: int  # of these, those that there are now
    peak: int  # the most that it has held since `settle`


class DeviceMemory(Protocol):
    """A device's memory, seen from this process."""

    def usage(self) -> MemoryUsage:
        """When everything that was launched is done."""
        ...

    def settle(self) -> None:
        """Give back what no tensor uses, and begin a new `peak`."""
        ...


class CudaMemory:
    """Of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def usage(self) -> MemoryUsage:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        held, tensors = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        return MemoryUsage(total, free, held, tensors, torch.cuda.max_memory_reserved(self._device))

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
