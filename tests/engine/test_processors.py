"""A process keeps off the processor where an engine's loop runs."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys, threading, time
from penstock.engine.processors import leave
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
leave(int(sys.argv[1]) if len(sys.argv) > 1 else None)
print([sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")])
"""


def after(*cpu: str) -> list[list[int]]:
    """Where each thread of a process may run once it has left a processor."""
    output = subprocess.run([sys.executable, "-c", CODE, *cpu], capture_output=True, text=True, check=True).stdout
    return [list(map(int, part.split(","))) for part in output.strip().strip("[]").split("], [")]


def test_all_threads_leave() -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one processor")
    assert after(str(mine[0])) == [mine[1:]] * 2


def test_nobody_leaves_the_only_one_or_for_a_loop_that_stays_nowhere() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert after() == [mine] * 2
    try:
        os.sched_setaffinity(0, {mine[0]})
        assert after(str(mine[0])) == [mine[:1]] * 2
    finally:
        os.sched_setaffinity(0, mine)
