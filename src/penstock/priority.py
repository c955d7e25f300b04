"""Runs parts of loading at a low priority, beside engines that compute.

This module imports little: an engine that replaces another one imports the rest through it.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

LOWEST = 19  # in the way of `nice`; it runs only where nothing else wants to run
T = TypeVar("T")


def lower(nice: int) -> None:
    """Lowers the priority of this thread for good, and of threads that it starts."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, nice)
    if nice == LOWEST:  # 19 still gets 1.5% of a processor, in slices longer than a step, which P99 shows
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def run_at(nice: int, call: Callable[[], T]) -> T:
    """Returns what `call` returns, or raises what it raises. It runs in a thread of its own, as a process could not
    raise its priority again without privileges."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        lower(nice)
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"nice {nice}", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
