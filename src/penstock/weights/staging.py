"""Where a reader puts what it has read until it is packed: one buffer for packers on the host, two for a device's."""

from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels import Packer


class Staging(Protocol):
    """Of one reader, a thread of its own."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size] to be filled, on the host. May wait until what was put before has left it."""
        ...

    def put(self, packer: Packer, start: int, rows: Tensor) -> None:
        """`rows`, which lie in the buffer, to their packer. Raises ValueError, as it does."""
        ...

    def close(self) -> None:
        """Wait until all that was put is where it belongs."""
        ...


class HostStaging:
    """Rows are packed where they were read."""

    def __init__(self, most: int) -> None:
        self._buffer = torch.empty(most, dtype=torch.uint8)

    def buffer(self, size: int) -> Tensor:
        return self._buffer[:size]

    def put(self, packer: Packer, start: int, rows: Tensor) -> None:
        packer.put(start, rows)

    def close(self) -> None:
        """Nothing is under way."""


class DeviceStaging:
    """Rows are copied to a device and packed there, on a stream of the reader's own. While one buffer is copied the
    other is filled; both are pinned, so that nobody waits for a copy and none of them needs a third place.

    `after` is the stream on which the weights' memory was allocated. On a CPU there are no streams, and nothing is
    pinned.
    """

    def __init__(self, most: int, device: torch.device, after: Any) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        if device.index is not None:  # a thread begins with the first one, where pinning memory would take a context
            self._module.set_device(device)
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(after)
        pin = device.type != "cpu"
        self._buffers = tuple(torch.empty(most, dtype=torch.uint8, pin_memory=pin) for _ in range(2))
        self._copied = tuple(self._module.Event() for _ in range(2))
        self._turn = 0

    def buffer(self, size: int) -> Tensor:
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn][:size]

    def put(self, packer: Packer, start: int, rows: Tensor) -> None:
        with self._module.stream(self._stream):
            there = rows.to(self._device, non_blocking=True)
            self._copied[self._turn].record(self._stream)
            packer.put(start, there)
        self._turn = 1 - self._turn

    def close(self) -> None:
        done = self._module.Event()
        done.record(self._stream)
        done.synchronize()
