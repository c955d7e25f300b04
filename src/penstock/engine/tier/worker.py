"""Threads that work on pages, beside the engine's steps."""

import logging
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

T = TypeVar("T")
Results = queue.SimpleQueue[Callable[[], None]]  # what the engine's thread calls when a thread has done something

NICE = 5  # added to the thread's niceness: kernels that compute beside it get three quarters of a shared core

log = logging.getLogger(__name__)


class Jobs(Protocol):
    """Does work elsewhere, in the order submitted."""

    def submit(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        """Run `work`. `done` is called later on the engine's thread with what it returned, or with None if it has
        raised an exception."""


class JobThread:
    """Jobs on a thread of their own. It is a daemon: a disk that hangs does not keep the process alive."""

    def __init__(self, name: str, results: Results) -> None:
        """The engine's thread calls what comes out of `results`."""
        self._results = results
        self._jobs: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[T | None], None]) -> None:
        self._jobs.put(partial(_run, work, done))

    def close(self, seconds: float) -> None:
        """End the thread after its jobs. It gets no longer than this."""
        self._jobs.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        give_way()
        while (job := self._jobs.get()) is not None:
            self._results.put(job())


def give_way() -> None:
    """Lower the priority of the calling thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _run(work: Callable[[], T], done: Callable[[T | None], None]) -> Callable[[], None]:
    value = None
    try:
        value = work()
    except Exception:
        log.exception("work on KV pages has failed; what it was for is computed instead")
    return partial(done, value)
