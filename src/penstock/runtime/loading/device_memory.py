"""Measures how much of a device's memory is in use."""

import gc
from typing import NamedTuple, Protocol

import torch


class MemoryUsage(NamedTuple):
    total: int  # the size of the device's memory
    free: int  # used by no process
    reserved: int  # by torch's allocator in this process: live tensors and its cache
    allocated: int  # the part of `reserved` that live tensors use
    peak: int  # the largest `reserved` since `release_unused`


class DeviceMemory(Protocol):
    """The memory of one device, as this process sees it."""

    def usage(self) -> MemoryUsage:
        """Blocks until all launched work is done, and returns the usage after it."""

    def release_unused(self) -> None:
        """Frees memory that no tensor uses and restarts `peak`."""


class CudaMemory:
    """The memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def usage(self) -> MemoryUsage:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        return MemoryUsage(total, free, reserved, allocated, torch.cuda.max_memory_reserved(self._device))

    def release_unused(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
