"""A team of native threads."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double
from typing import Any

from penstock.kernels.native.loader import native_library


class ThreadTeam:
    """Threads that run native ops together. Only one thread may call a team."""

    def __init__(self, isa: str, threads: int, cpus: Sequence[int] = ()) -> None:
        """Pins the threads, the calling one first, to `cpus` if there are as many."""
        library = native_library()
        self._library = library
        self._handle = library and library.penstock_start(
            isa.encode(), threads, (ctypes.c_int * len(cpus))(*cpus), len(cpus)
        )
        if not library or not self._handle:
            raise OSError(f"could not start {threads} threads with {isa} kernels")
        self.isa, self.threads = isa, threads

    def run(self, ops: Any, count: int) -> None:
        """Run `count` ops in order, from an array or a reference into one. Raises MemoryError for lack of scratch."""
        assert self._library is not None
        if self._library.penstock_run(self._handle, ops, count):
            raise MemoryError("no memory for the native kernels' scratch")

    def profile(self, ops: Any, count: int) -> list[float]:
        """`run`, and return the seconds that each op took."""
        assert self._library is not None
        seconds = (c_double * count)()
        if self._library.penstock_profile(self._handle, ops, count, seconds):
            raise MemoryError("no memory for the native kernels' scratch")
        return list(seconds)

    def wake(self) -> None:
        """Wake sleeping threads for a run that comes soon: they take longer to wake than a step's inputs to be made."""
        assert self._library is not None
        self._library.penstock_wake(self._handle)

    def rest(self) -> None:
        """Let the threads sleep until the next run, so that they do not spin on processors that others use now."""
        assert self._library is not None
        self._library.penstock_rest(self._handle)

    def close(self) -> None:
        if self._handle and self._library:
            self._library.penstock_stop(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()
