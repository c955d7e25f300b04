"""Staging buffers: rows lie there between the disk and their packer."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Staging(Protocol):
    """The buffers of one reader thread."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size] on the host, to be filled. Blocks until its last content has been copied."""

    def put(self, pack: Callable[..., None], start: int, *rows: Tensor) -> None:
        """Call `pack(start, *rows)`, a method of a packer, where weights are packed. `rows` lie in the buffer, or in
        memory of their own. Raises ValueError if the packer does."""

    def close(self) -> None:
        """Block until all rows are packed."""


class HostStaging:
    """One buffer: rows are packed from it at once."""

    def __init__(self, most: int) -> None:
        self._buffer = torch.empty(most, dtype=torch.uint8)

    def buffer(self, size: int) -> Tensor:
        return self._buffer[:size]

    def put(self, pack: Callable[..., None], start: int, *rows: Tensor) -> None:
        pack(start, *rows)

    def close(self) -> None:
        """Returns at once: `put` has packed everything."""


class DeviceStaging:
    """Two pinned buffers: one is filled while the other is copied to the device. Rows are packed there, on a stream of
    this reader.

    `after` is the stream on which the weights' memory was allocated. A CPU has no streams, and nothing is pinned.
    """

    def __init__(self, most: int, device: torch.device, after: Any) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        if device.index is not None:  # a new thread uses device 0, and pinning memory would make a context there
            self._module.set_device(device)
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(after)
        pin = device.type != "cpu"
        self._buffers = tuple(torch.empty(most, dtype=torch.uint8, pin_memory=pin) for _ in range(2))
        self._copied = tuple(self._module.Event() for _ in range(2))
        self._current = 0

    def buffer(self, size: int) -> Tensor:
        self._copied[self._current].synchronize()
        return self._buffers[self._current][:size]

    def put(self, pack: Callable[..., None], start: int, *rows: Tensor) -> None:
        with self._module.stream(self._stream):
            there = [each.to(self._device, non_blocking=True) for each in rows]
            self._copied[self._current].record(self._stream)
            pack(start, *there)
        self._current = 1 - self._current

    def close(self) -> None:
        done = self._module.Event()
        done.record(self._stream)
        done.synchronize()
