"""Watches whether the processor is calm: whether nothing else runs on its cores.

On a shared machine another guest may run on the second thread of a core, for milliseconds or for minutes. Then our
products take 1.2 to 5 times as long, so figures of such a time cannot be compared with others. A block of independent
instructions takes longer too, but a chain of dependent ones does not. A sample is the ratio of their times, which does
not depend on the clock. It is calm if it is close to the core's lowest ratio so far. It takes 10 µs, every 5 ms.
"""

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from results import CPUS

from penstock.kernels.native.build import CannotBuild, compiler

PERIOD = 0.005  # seconds between two samples of a core
LIMIT = 1.15  # of a calm sample's ratio over the lowest. Measured: calm up to 1.1, disturbed 1.3 to 2
SHARE = 0.8  # of a window's samples that are calm, if the window is
JUST_NOW = 0.02  # seconds
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

T = TypeVar("T")


class Watch:
    """Samples every processor of this process until the process ends."""

    def __init__(self, patience: float = 0.0) -> None:
        """`patience`: the seconds that all calls of `wait` together may take."""
        self._patience = patience
        self._library = None if _siblings(CPUS) else _library()
        if self._library:
            self._library.watch((ctypes.c_int * len(CPUS))(*CPUS), len(CPUS), ctypes.c_double(PERIOD))
            time.sleep(20 * PERIOD)

    def share(self, began: float, ended: float) -> float | None:
        """The share of calm samples between two times of `time.perf_counter`, of the core with the smallest one. None
        if it is unknown: without a compiler, on two threads of one core, or without a sample."""
        if not self._library:
            return None
        found = self._library.calm_share(*map(ctypes.c_double, (began, ended, LIMIT)))
        return None if found < 0 else round(found, 3)

    def calm(self, began: float) -> bool | None:
        """True if the processor was calm from `began` until now, None if that is unknown."""
        share = self.share(began, time.perf_counter())
        return None if share is None else share >= SHARE

    def wait(self) -> float:
        """Returns when the processor is calm, or patience has ended. Returns the time."""
        began = time.perf_counter()
        while self.calm(time.perf_counter() - JUST_NOW) is False and time.perf_counter() < began + self._patience:
            time.sleep(PERIOD)
        now = time.perf_counter()
        self._patience -= now - began
        return now


def kept(found: Sequence[tuple[T, bool | None]]) -> tuple[list[T], bool | None]:
    """The results of calm windows, and True. If fewer than a quarter were calm: all results, and False, or None if
    some are unknown."""
    calm = [result for result, was_calm in found if was_calm]
    if len(calm) * 4 >= len(found):
        return calm, True
    return [result for result, _ in found], None if any(each is None for _, each in found) else False


def said(calm: bool | None) -> str:
    """The word for tables."""
    return {True: "calm", False: "disturbed", None: "–"}[calm]


def _siblings(cpus: Sequence[int]) -> bool:
    """True if two of the processors are threads of one core. Then they disturb each other, and samples say nothing."""
    paths = (Path(TOPOLOGY.format(cpu)) for cpu in cpus)
    cores = [path.read_text() for path in paths if path.exists()]
    return len(set(cores)) < len(cores)


def _library() -> ctypes.CDLL | None:
    source = Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "calm.so")
        try:
            command = [*compiler(), "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", str(source), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True)
        except (CannotBuild, OSError, subprocess.CalledProcessError) as error:
            print(f"whether the processor is calm is unknown: {error}", file=sys.stderr)
            return None
        library = ctypes.CDLL(str(built))
    library.calm_share.restype = ctypes.c_double
    return library
