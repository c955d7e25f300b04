"""Real `penstock engine` processes on loopback."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.weights.packaged import EMBEDDED
from tests.e2e.bound import bound
from tests.e2e.server import PATIENCE, wait_for
from tests.engine.processes import alive, children

KEY = "key-of-the-tests"


class EngineHostProcess:
    """A running `penstock engine`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log
        self.address = wait_for(self._address, PATIENCE, "an engine to listen")

    def _address(self) -> str:
        if self.process.poll() is not None:
            raise AssertionError(f"the engine ended with {self.process.returncode}:\n{self.log.read_text()}")
        found = re.search(r"listens on (\S+),", self.log.read_text())
        return found[1] if found else ""

    @property
    def engine_pid(self) -> int:
        """The process that computes."""
        return next(
            pid for pid in children(self.process.pid) if b"engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to the process that fronts connect to."""
        os.kill(self.process.pid, number)


def start_engine(log: Path, *flags: str, model: str = EMBEDDED) -> subprocess.Popen[bytes]:
    """Start `penstock engine`. It may take seconds until it listens."""
    command = [sys.executable, "-m", "penstock", "engine", model, "--listen", "127.0.0.1:0", "--threads", "1", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_FLEET_KEY": KEY}
    with log.open("wb") as sink:
        return subprocess.Popen(bound(command), stdout=sink, stderr=sink, env=environment, start_new_session=True)


@contextlib.contextmanager
def engines(folder: Path, count: int, *flags: str) -> Iterator[list[EngineHostProcess]]:
    """So many engines, which listen. At the end none of their processes is left."""
    logs = [folder / f"engine-{number}" for number in range(count)]
    processes = [start_engine(log, "--kv-cache-memory", "64MiB", *flags) for log in logs]
    inner: list[int] = []
    try:
        hosts = [EngineHostProcess(process, log) for process, log in zip(processes, logs, strict=True)]
        inner = [host.engine_pid for host in hosts]
        yield hosts
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        wait_for(lambda: not any(map(alive, inner)), PATIENCE, "the engines' processes to end")
