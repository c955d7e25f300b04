"""A process keeps off the processor where an engine's loop runs."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import os, sys, threading, time
from penstock.engine.processors import keep_off

def wait():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def print_allowed():
    print([sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")])

wait()
with keep_off(int(sys.argv[1]) if len(sys.argv) > 1 else None):
    wait()
    print_allowed()
print_allowed()
"""


def meanwhile_and_after(*cpu: str) -> list[list[list[int]]]:
    """Where each thread of a process may run while it keeps off a processor, and then."""
    output = subprocess.run([sys.executable, "-c", CODE, *cpu], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_all_threads_keep_off_for_a_while() -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one processor")
    assert meanwhile_and_after(str(mine[0])) == [[mine[1:]] * 3, [mine] * 3]


def test_nobody_keeps_off_the_only_one_or_for_a_loop_that_stays_nowhere() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert meanwhile_and_after() == [[mine] * 3] * 2
    try:
        os.sched_setaffinity(0, {mine[0]})
        assert meanwhile_and_after(str(mine[0])) == [[mine[:1]] * 3] * 2
    finally:
        os.sched_setaffinity(0, mine)
