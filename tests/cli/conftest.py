"""The command line in this process, without the second that a process of its own takes."""

import io
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from penstock.cli import usage
from penstock.cli.main import main
from penstock.cli.plan import bandwidth, command

made_once = cache(usage.root_of)  # typer makes a command anew whenever it is run, which takes longest
measured_once = cache(bandwidth.read_bandwidth)  # every plan for this machine measures it on all processors
RunCommand = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCommand:
    """run_command(*arguments) runs `penstock` with them, and gives what it and its engine printed and how it ended.
    Nothing is piped into it, unless the test sets sys.stdin."""
    monkeypatch.setattr(usage, "root_of", made_once)
    for module in (bandwidth, command):
        monkeypatch.setattr(module, "read_bandwidth", measured_once)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = capfd.readouterr()
        code = end.value.code or 0
        assert isinstance(code, int)
        return subprocess.CompletedProcess(sys.argv, code, said.out, said.err)

    return run
