"""Which processors a process uses beside an engine that computes on all of them."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def keep_off(cpu: int | None) -> Iterator[None]:
    """Keep this process, with all its threads, off the processor that an engine's loop stays on; where there are more.

    Between two steps the loop works alone, and its other threads wait for it: who ran on its processor then would hold
    up all of them. On another's, the two work side by side. Threads and processes that are begun meanwhile inherit it;
    the threads may run where they might before in the end, and new ones where the caller might.
    """
    before, own = _allowed(), os.sched_getaffinity(0)
    _allow({thread: cpus - {cpu} or cpus for thread, cpus in before.items()})
    try:
        yield
    finally:
        _allow({thread: before.get(thread, own) for thread in _allowed()})


def _allowed() -> dict[int, set[int]]:
    """The processors of each of our threads."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            found[int(thread.name)] = os.sched_getaffinity(int(thread.name))
    return found


def _allow(cpus: Mapping[int, set[int]]) -> None:
    for thread, allowed in cpus.items():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, allowed)
