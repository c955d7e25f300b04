"""The processors of a process that runs beside an engine."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping


@contextlib.contextmanager
def keep_off(cpu: int | None) -> Iterator[None]:
    """Keep all threads of this process off the processor `cpu`, which an engine's loop stays on, if there are others.

    Between two steps the engine's other threads wait for its loop, so a thread on the loop's processor delays all of
    them. Threads and processes started in the context inherit the restriction. At its end, threads that were there
    before get their processors back, and new threads get the caller's.
    """
    before, own = _allowed(), os.sched_getaffinity(0)
    _allow({thread: cpus - {cpu} or cpus for thread, cpus in before.items()})
    try:
        yield
    finally:
        _allow({thread: before.get(thread, own) for thread in _allowed()})


@contextlib.contextmanager
def running_on(cpus: Collection[int]) -> Iterator[None]:
    """Let this thread, and with it processes that are started in the context, run on these processors."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _allowed() -> dict[int, set[int]]:
    """Return the processors that each of our threads may run on."""
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            found[thread] = os.sched_getaffinity(thread)
    return found


def _allow(cpus: Mapping[int, set[int]]) -> None:
    for thread, allowed in cpus.items():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, allowed)
