"""Real `penstock engine` processes on loopback."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.weights.packaged import EMBEDDED
from tests.e2e.bound import bound
from tests.engine.processes import alive, children
from tests.patience import wait_for

KEY = "key-of-the-tests"


class EngineHostProcess:
    """A running `penstock engine`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log
        self.address = wait_for(self._address, "an engine to listen")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

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


def start_engine(
    log: Path,
    *flags: str,
    model: str = EMBEDDED,
    host: str = "127.0.0.1",
    port: int = 0,
    within: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start `penstock engine`, by the command `within`. It may take seconds until it listens."""
    listen = ("--listen", f"{host}:{port}", "--threads", "1", "--kv-cache-memory", "64MiB")
    command = [*within, sys.executable, "-m", "penstock", "engine", model, *listen, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_FLEET_KEY": KEY}
    with log.open("wb") as sink:
        return subprocess.Popen(bound(command), stdout=sink, stderr=sink, env=environment, start_new_session=True)


@contextlib.contextmanager
def engines(
    folder: Path, count: int, *common: str, flags: Sequence[Sequence[str]] | None = None
) -> Iterator[list[EngineHostProcess]]:
    """So many engines, which listen, with flags of all and of each. At the end none of their processes is left."""
    logs = [folder / f"engine-{number}" for number in range(count)]
    processes = [start_engine(log, *common, *own) for log, own in zip(logs, flags or [()] * count, strict=True)]
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
        wait_for(lambda: not any(map(alive, inner)), "the engines' processes to end")
