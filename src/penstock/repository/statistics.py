"""What a version of a one-shot model has done, in the form of Triton's statistics."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.messages import DeadlineExceeded, EngineError, QueueFull
from penstock.observe.histogram import REQUEST_SECONDS, Histogram


class Duration:
    """A number of events and the nanoseconds that they took."""

    __slots__ = ("count", "ns")

    def __init__(self, count: int = 0, ns: int = 0) -> None:
        self.count = count
        self.ns = ns

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def fields(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


_OF_BATCH = ("compute_input", "compute_infer", "compute_output")


class ModelStatistics:
    """Counts of one version. Times are in nanoseconds."""

    def __init__(self) -> None:
        self.inferences = 0  # rows
        self.executions = 0  # batches
        self.last = 0  # milliseconds since the epoch
        self.cache_hit, self.cache_miss, self._fail = Duration(), Duration(), Duration()
        self.answered = 0  # requests
        self._answered_ns = self._queued_ns = 0  # sums of their times
        self.failures = dict.fromkeys(("REJECTED", "CANCELED", "BACKEND", "OTHER"), 0)  # requests, by reason
        self._batches: dict[tuple[int, int], list[int]] = {}  # by rows and requests: the count, and sums of the times
        self.latency = Histogram(REQUEST_SECONDS)
        self.began = time.monotonic()

    def batch(self, rows: int, requests: int, compute: tuple[int, int, int]) -> None:
        """Counts a batch that ran. `compute`: the times of reading inputs, of the run, and of writing outputs."""
        self.executions += 1
        self.inferences += rows
        self.last = int(time.time() * 1000)
        sums = self._batches.get((rows, requests))
        if sums is None:
            sums = self._batches[rows, requests] = [0, 0, 0, 0]
        read, run, wrote = compute
        sums[0] += 1
        sums[1] += read
        sums[2] += run
        sums[3] += wrote

    def request(self, seconds: float, queued: float, count: int = 1) -> None:
        """Counts a request that was answered, or several that took as long."""
        self.answered += count
        self._answered_ns += int(seconds * 1e9) * count
        self._queued_ns += int(queued * 1e9) * count
        self.latency.observe(seconds, count)

    @property
    def durations(self) -> Mapping[str, Duration]:
        """The times of requests. A part of a batch's run counts once for each of its requests."""
        compute = [Duration() for _ in _OF_BATCH]
        for (_, requests), (count, *times) in self._batches.items():
            for one, ns in zip(compute, times, strict=True):
                one.count += count * requests
                one.ns += ns * requests
        return {
            "success": Duration(self.answered, self._answered_ns),
            "fail": self._fail,
            "queue": Duration(self.answered, self._queued_ns),
            **dict(zip(_OF_BATCH, compute, strict=True)),
            "cache_hit": self.cache_hit,
            "cache_miss": self.cache_miss,
        }

    @property
    def batches(self) -> Mapping[int, Sequence[Duration]]:
        """The times of the parts of batches, by their rows."""
        found: dict[int, list[Duration]] = {}
        for (rows, _), (count, *times) in self._batches.items():
            for one, ns in zip(found.setdefault(rows, [Duration() for _ in _OF_BATCH]), times, strict=True):
                one.count += count
                one.ns += ns
        return found

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
        self._fail.add(int(seconds * 1e9))

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
