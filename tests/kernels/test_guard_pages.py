"""No op touches a byte outside its tensors, before them or behind: each lies between two forbidden pages."""

import signal
import subprocess
from collections.abc import Callable

RunCases = Callable[..., subprocess.CompletedProcess[str]]


def test_every_op_stays_within_its_tensors(run_cases: RunCases) -> None:
    done = run_cases("guarded", 2)
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-3000:]}"
    assert done.stdout.endswith("all right\n")


def test_a_tensor_that_is_too_short_is_noticed(run_cases: RunCases) -> None:
    done = run_cases("short", 1)
    assert done.returncode == -signal.SIGSEGV, done.stderr[-3000:]
