"""The turns of engines in several processes on the same processors (native/cpp/lease.h)."""

import ctypes
import math
import mmap

from penstock.config.engine import LEASE_BYTES, LeasePlace
from penstock.kernels.native.loader import native_library
from penstock.kernels.native.session import rest_teams

_NEVER = (1 << 63) - 1
_WAIT, _CONTESTED = 0, 2  # ProcessorLease::Answer


class SharedProcessors:
    """See penstock.messages.StepLease. Used on the thread of the engine's loop."""

    def __init__(self, own: LeasePlace) -> None:
        """Raises OSError if the segment cannot be mapped."""
        library = native_library()
        if library is None or library.penstock_lease_bytes() != LEASE_BYTES:
            raise OSError("the native library has no step lease of this version: reinstall penstock")
        with open(own.path, "r+b", buffering=0) as file:
            self._segment = mmap.mmap(file.fileno(), LEASE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._segment))
        self._library, self._lease = library, library.penstock_lease_open(address, own.place, own.weight)

    def take(self, due: float) -> bool:
        answer = self._library.penstock_lease_take(self._lease, _NEVER if due == math.inf else int(due * 1e9))
        if answer == _WAIT:
            rest_teams()
            answer = self._library.penstock_lease_wait(self._lease)
        return bool(answer == _CONTESTED)

    def give(self) -> None:
        rest_teams()
        self._library.penstock_lease_give(self._lease)
