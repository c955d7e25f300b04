"""Ctrl-C and SIGTERM while a command is still being imported."""

import signal
import subprocess
import sys

import pytest

INTERRUPTED_AT = """
import os, signal, sys

class Signal:
    def find_spec(name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Signal)
sys.argv = ["penstock", "run", "Hi there"]
from penstock.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "name", ["penstock.cli.main", "typer", "penstock.cli.run", "penstock.prepare.model", "msgspec"]
)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_ends_quietly(name: str, number: signal.Signals, status: int) -> None:
    code = INTERRUPTED_AT.format(name=name, number=int(number))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
