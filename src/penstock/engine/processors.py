"""Which processors a process uses beside an engine that computes on all of them."""

import contextlib
import os
from pathlib import Path


def leave(cpu: int | None) -> None:
    """Keep this process, with all its threads, off the processor that an engine's loop stays on; where there are more.

    Between two steps the loop works alone, and its other threads wait for it: who ran on its processor then would hold
    up all of them. On another's, the two work side by side.
    """
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            others = os.sched_getaffinity(int(thread.name)) - {cpu}
            if others:
                os.sched_setaffinity(int(thread.name), others)
