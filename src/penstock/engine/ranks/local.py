"""The ranks of an engine as processes of this machine."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from penstock.engine.child import SOCKET_NAME, STDERR, how_it_ended, private_directory
from penstock.engine.ranks.rank_socket import RankSocket
from penstock.engine.ranks.wire import Report

# -P keeps the working directory, which may be a model's, out of the module search path.
WORKER = (sys.executable, "-P", "-m", "penstock.engine.ranks.worker")
REAP_SECONDS = 5.0  # that the kernel may take to end a killed process
LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


class LocalRanks:
    """Processes, each with a pipe whose end reports our death, and the socket they connect to.

    The socket file (mode 0600) lies in a private directory (mode 0700); both are removed once all are connected.
    Raises OSError where a process cannot be started.
    """

    host = LOOPBACK  # of rank 0

    def __init__(self, world: int, command: Sequence[str] = WORKER) -> None:
        self.names: list[str] = []
        self.machines = ["here"] * world
        self._processes: list[subprocess.Popen[bytes]] = []
        self._held = contextlib.ExitStack()
        try:
            self._directory = private_directory()
            self._held.callback(shutil.rmtree, self._directory, ignore_errors=True)
            path = self._directory / SOCKET_NAME
            self._socket = RankSocket(world, f"ipc://{path}")
            self._held.callback(self._socket.close)
            path.chmod(0o600)
            for rank in range(world):
                self._start([*command, self._socket.endpoint, str(rank)])
                self.names.append(f"rank {rank} (pid {self._processes[rank].pid})")
        except BaseException:
            self.close()
            raise

    def connected(self) -> None:
        """Remove the socket's file, as all ranks are connected. No process can connect or leave a file from now on."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def send(self, rank: int, frame: bytes) -> None:
        self._socket.send(rank, frame)

    def receive(self, seconds: float) -> list[tuple[int, Report]]:
        """Return (rank, report) of every report received. Blocks up to `seconds` for one, or for a process to end."""
        return self._socket.receive(seconds)

    def ended(self) -> dict[int, str]:
        """Return how the ranks that have ended did so, in words, by rank."""
        statuses = ((rank, process.poll()) for rank, process in enumerate(self._processes))
        return {rank: how_it_ended(status) for rank, status in statuses if status is not None}

    def close(self) -> None:
        """Kill every process and release everything. May be called twice."""
        for process in self._processes:
            process.kill()  # all of them before the wait for the first; a stopped process dies too
        self._held.close()

    def _start(self, command: Sequence[str]) -> None:
        stdin, lifeline = os.pipe()
        self._held.callback(os.close, lifeline)
        with open(stdin, "rb") as pipe:
            process = subprocess.Popen(command, stdin=pipe, stdout=STDERR)
        self._held.callback(_reap, process)
        self._processes.append(process)
        descriptor = os.pidfd_open(process.pid)
        self._held.callback(os.close, descriptor)
        self._socket.watch(descriptor)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    try:
        process.wait(REAP_SECONDS)
    except subprocess.TimeoutExpired:
        log.error("process %d does not end: the kernel holds it in a system call", process.pid)
