"""What a version of a one-shot model has done, in the form of Triton's statistics."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from penstock.messages import DeadlineExceeded, EngineError, QueueFull
from penstock.observe.histogram import REQUEST_SECONDS, Histogram


class Duration:
    """A number of events and the nanoseconds that they took."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns * count

    def fields(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_OF_BATCH = ("compute_input", "compute_infer", "compute_output")


class ModelStatistics:
    """Counts of one version. Times are in nanoseconds."""

    def __init__(self) -> None:
        self.inferences = 0  # rows
        self.executions = 0  # batches
        self.last = 0  # milliseconds since the epoch
        self.durations: Mapping[str, Duration] = {name: Duration() for name in _DURATIONS}
        self.failures = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)  # requests, by reason
        self._of_batches = [self.durations[name] for name in _OF_BATCH]
        self.batches: dict[int, list[Duration]] = {}  # by rows: the same of batches of that size
        self.latency = Histogram(REQUEST_SECONDS)
        self.began = time.monotonic()

    def batch(self, rows: int, requests: int, compute: tuple[int, int, int]) -> None:
        """Counts a batch that ran. `compute`: the times of reading inputs, of the run, and of writing outputs."""
        self.executions += 1
        self.inferences += rows
        self.last = int(time.time() * 1000)
        of_size = self.batches.get(rows)
        if of_size is None:
            of_size = self.batches[rows] = [Duration() for _ in _OF_BATCH]
        for one, all_sizes, ns in zip(of_size, self._of_batches, compute, strict=True):
            one.add(ns)
            all_sizes.add(ns, requests)

    def request(self, seconds: float, queued: float, count: int = 1) -> None:
        """Counts a request that was answered, or several that took as long."""
        self.durations["success"].add(int(seconds * 1e9), count)
        self.durations["queue"].add(int(queued * 1e9), count)
        self.latency.observe(seconds, count)

    def failed(self, seconds: float, error: BaseException) -> None:
        """Counts a request that ended with an error. The reasons are Triton's."""
        match error:
            case QueueFull() | DeadlineExceeded():
                reason = "REJECTED"
            case asyncio.CancelledError():
                reason = "CANCELED"
            case EngineError():
                reason = "BACKEND"
            case _:
                reason = "OTHER"
        self.failures[reason] += 1
        self.durations["fail"].add(int(seconds * 1e9))

    def fields(self, name: str, version: str) -> dict[str, Any]:
        """The fields of Triton's ModelStatistics."""
        return {
            "name": name,
            "version": version,
            "last_inference": self.last,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {name: duration.fields() for name, duration in self.durations.items()},
            "batch_stats": [
                {"batch_size": rows, **{name: each.fields() for name, each in zip(_OF_BATCH, of_size, strict=True)}}
                for rows, of_size in sorted(self.batches.items())
            ],
        }
