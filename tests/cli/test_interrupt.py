"""Ctrl-C while a command is still being imported."""

import subprocess
import sys

import pytest

INTERRUPTED_AT = """
import os, signal, sys

class Ctrl_C:
    def find_spec(name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Ctrl_C)
sys.argv = ["penstock", "run", "Hi there"]
from penstock.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["penstock.cli.main", "typer", "penstock.cli.run", "penstock.cli.prepare", "msgspec"])
def test_it_ends_quietly(name: str) -> None:
    code = INTERRUPTED_AT.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
