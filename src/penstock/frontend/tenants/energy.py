"""Reads the machine's meters of energy: NVML of its GPUs, else RAPL of its processors.

A meter is a function that returns joules since some time in the past. `EnergyMeter` asks it once a second.
"""

import ctypes
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

RAPL = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
_KEPT = 3600  # samples: of longer requests the last hour or two count
_log = logging.getLogger("penstock.ledger")


class MeterSource(NamedTuple):
    """A meter, by the name that rows of the ledger have."""

    name: str
    joules: Callable[[], float]


def rapl(folder: Path = RAPL) -> MeterSource | None:
    """Return the meter of all packages of processors; None if there is none that this user may read."""
    try:
        counters = [
            _RaplCounter(path.parent)
            for path in sorted(folder.glob("*/energy_uj"))
            if (path.parent / "name").read_text().startswith("package")
        ]
        for counter in counters:
            counter.joules()
    except OSError as error:
        _log.warning("the ledger has no measured energy: %s; allow this user to read it", error)
        return None
    return MeterSource("rapl", lambda: sum(each.joules() for each in counters)) if counters else None


def nvml(library: str = NVML) -> MeterSource | None:
    """Return the meter of all GPUs; None if there is none."""
    try:
        functions = ctypes.CDLL(library)
    except OSError:
        return None
    count, handles = ctypes.c_uint(), list[ctypes.c_void_p]()
    if functions.nvmlInit_v2() or functions.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if not functions.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            handles.append(handle)
    used = ctypes.c_ulonglong()

    def joules() -> float:
        total = 0
        for handle in handles:
            if functions.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used)):
                raise OSError(f"{library} does not say what a GPU has used")
            total += used.value
        return total / 1e3

    try:
        joules()
    except OSError:
        return None
    return MeterSource("nvml", joules) if handles else None


class EnergyMeter:
    """The power that the machine takes, sampled once a second by a thread until the process ends."""

    def __init__(self, source: MeterSource, clock: Callable[[], float] = time.time) -> None:
        self.source = source.name
        self._joules, self._clock = source.joules, clock
        self._samples: list[tuple[float, float]] = []  # (time, joules)
        self.sample()

    def start(self) -> None:
        threading.Thread(target=self._run, name="energy", daemon=True).start()

    def sample(self) -> None:
        """Raises OSError."""
        if len(self._samples) == 2 * _KEPT:
            self._samples = self._samples[-_KEPT:]
        self._samples.append((self._clock(), self._joules()))

    def watts(self, began: float) -> float:
        """Return the mean power from the last sample before a time until the last sample; 0 in the first second."""
        samples = self._samples
        first = samples[max(0, min(bisect_right(samples, (began, float("inf"))) - 1, len(samples) - 2))]
        seconds = samples[-1][0] - first[0]
        return (samples[-1][1] - first[1]) / seconds if seconds > 0 else 0.0

    def _run(self) -> None:
        while True:
            time.sleep(1.0)
            try:
                self.sample()
            except OSError as error:
                _log.error("the energy of requests is not measured any more: %s", error)
                self.source = ""
                return


def open_meter() -> EnergyMeter | None:
    """Return a running meter of the machine; None if it has none."""
    if (source := nvml() or rapl()) is None:
        return None
    meter = EnergyMeter(source)
    meter.start()
    return meter


class _RaplCounter:
    """The counter of one package, in microjoules, which begins anew after its range."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last, self._whole = 0, 0

    def joules(self) -> float:
        """Raises OSError."""
        now = int(self._file.read_text())
        if now < self._last:
            self._whole += self._range
        self._last = now
        return (self._whole + now) / 1e6
