"""Native threads that read weights from files and pack them (see cpp/reading.h). They need no lock of Python's and so
run while the interpreter is busy."""

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from functools import cache

from penstock.kernels.native.loader import LIBRARY
from penstock.kernels.native.packer import cannot_quantise
from penstock.kernels.native.structs import ReadFailure, ReadJob

AT_ONCE = 4  # jobs that the waiting thread does between two progress reports


class ReadFailed(Exception):
    """Weights could not be read or packed. `job` is the index of the job that failed."""

    def __init__(self, job: int, reason: str) -> None:
        super().__init__(reason)
        self.job = job


class WeightReader:
    """Native threads that do read jobs. They start at once. Until `close`, the jobs' files must stay open and the
    memory that they pack into allocated. Only one thread may call it."""

    def __init__(self, jobs: Sequence[ReadJob], threads: int) -> None:
        """The threads have the lowest priority, so other work on the machine comes first."""
        self._threads = threads
        self._jobs = (ReadJob * len(jobs))(*jobs)
        self._handle = _functions().penstock_read(self._jobs, len(jobs), threads)
        if not self._handle:
            raise MemoryError("no memory to read weights")

    def finish(self, advance: Callable[[int], None], *, hurry: bool = True) -> None:
        """Block until all jobs are done. With `hurry`, this thread takes part at once, and threads of ordinary priority
        are added. `advance` is called with the number of bytes done since its last call. Raises ReadFailed."""
        before = done = 0
        library, failure = _functions(), ReadFailure()
        if hurry:
            library.penstock_read_hurry(self._handle, min(self._threads, len(os.sched_getaffinity(0)) - 1))
        else:
            library.penstock_read_wait(self._handle, ctypes.byref(failure))
        while (done := library.penstock_help(self._handle, AT_ONCE)) > before:
            advance(done - before)
            before = done
        library.penstock_read_wait(self._handle, ctypes.byref(failure))
        advance(library.penstock_help(self._handle, 0) - before)
        if failure.job >= 0:
            raise ReadFailed(failure.job, _reason(failure))

    def close(self) -> None:
        """Stop. Jobs that have not started are dropped."""
        if self._handle:
            _functions().penstock_read_end(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _reason(failure: ReadFailure) -> str:
    if failure.error:
        return os.strerror(failure.error)
    return cannot_quantise(failure.bad_rows) if failure.bad_rows else f"the file ended at byte {failure.end}"


@cache
def _functions() -> ctypes.CDLL:
    """The reading functions of the library, whose version `instruction_sets` has checked."""
    library = ctypes.CDLL(str(LIBRARY))
    library.penstock_read.restype = c_void_p
    library.penstock_read.argtypes = (c_void_p, c_int64, ctypes.c_int)
    library.penstock_read_hurry.restype = None
    library.penstock_read_hurry.argtypes = (c_void_p, ctypes.c_int)
    library.penstock_help.restype = c_int64
    library.penstock_help.argtypes = (c_void_p, c_int64)
    library.penstock_read_wait.restype = None
    library.penstock_read_wait.argtypes = (c_void_p, c_void_p)
    library.penstock_read_end.restype = None
    library.penstock_read_end.argtypes = (c_void_p,)
    return library
