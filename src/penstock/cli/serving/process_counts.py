"""Brings what API processes have counted into the metrics of their server."""

import asyncio
import os
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from penstock.cli.serving.process_slot import ProcessSlot
from penstock.observe.counts import Counts, add, subtract
from penstock.observe.metrics import Metrics
from penstock.observe.model_metrics import ModelMetrics
from penstock.observe.processes import usage_of_one

_NOTHING: Counts = {"model": {}, "queue": {}}


class ProcessCounts:
    """The counts of all API processes, those that have ended included. What this process counts itself stays."""

    def __init__(self, slots: Sequence[ProcessSlot], dropped_lines: Callable[[], int], *, vllm_names: bool) -> None:
        """`dropped_lines` returns the number of this process's own."""
        self.metrics = Metrics(CollectorRegistry(), dropped_lines, self._usage, vllm_names=vllm_names)
        self._slots, self._dropped_lines = slots, dropped_lines
        self._gone: tuple[Counts, float] = ({}, 0.0)  # of processes that have ended, and their processor seconds
        self._added: dict[tuple[int, str], tuple[ModelMetrics, Counts]] = {}  # what is in the metrics of each model
        self._looking = asyncio.Lock()

    async def look(self) -> None:
        """Gets the counts of all processes."""
        async with self._looking:
            await asyncio.gather(*(slot.look() for slot in self._slots))
            total = add(self._gone[0], {"dropped_lines": self._dropped_lines()})
            for slot in self._slots:
                total = add(total, slot.counts.get("server", {}))
                self._add_models(slot.number, slot.counts)
            self.metrics.load({"requests": {}, "storage": {}, "counted": {}, "now": {}, **total})

    def ended(self, number: int, counts: Counts, seconds: float) -> None:
        """Keeps what a process has counted that has ended, and its processor seconds."""
        self._add_models(number, counts)
        for key in [key for key in self._added if key[0] == number]:
            del self._added[key]
        self._gone = add(self._gone[0], counts.get("server", {})), self._gone[1] + seconds

    def _add_models(self, number: int, counts: Counts) -> None:
        """Adds what a process has counted for each model since the last time."""
        for name, found in counts.get("models", {}).items():
            if (model := self.metrics.models.get(name)) is None:
                continue
            of_model, before = self._added.get((number, name), (model, _NOTHING))
            news = subtract(found, before if of_model is model else _NOTHING)
            self._added[number, name] = model, found
            model.load(add(model.counts(), news["model"]))
            queue = model.engine.queue
            queue.refused += news["queue"]["refused"]
            queue.late += news["queue"]["late"]

    def _usage(self) -> tuple[int, float]:
        """The resident bytes and processor seconds of this process and the API processes."""
        own = usage_of_one(os.getpid()) or (0, 0.0)
        used = [own, *(slot.used for slot in self._slots)]
        return sum(resident for resident, _ in used), self._gone[1] + sum(seconds for _, seconds in used)
