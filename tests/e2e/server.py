"""A real `penstock serve` in a process of its own."""

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from penstock.weights.packaged import EMBEDDED
from tests.described import check_described
from tests.e2e.bound import bound
from tests.engine.processes import alive, children
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port


def status(url: str, context: ssl.SSLContext | None = None, timeout: float = 5.0) -> int:
    """The HTTP status of a GET; 0 where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except OSError:
        return 0


def gauge(text: str, name: str) -> float:
    """The value of a metric in a scrape, summed over its labels."""
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    assert values, f"{name} is not among the metrics"
    return sum(values)


class Server:
    """A running server: its address and its processes. Without TLS no authorities are read, which takes 20 ms."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, log: Path, context: ssl.SSLContext | None = None
    ) -> None:
        self.process = process
        self.port = port
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{port}"
        self.log = log
        self.context = context

    def get(self, path: str) -> httpx.Response:
        return self._described(httpx.get(self.url + path, timeout=PATIENCE, verify=self.context or False))

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._described(httpx.post(self.url + path, json=body, timeout=PATIENCE, verify=self.context or False))

    def _described(self, response: httpx.Response) -> httpx.Response:
        check_described(response)
        return response

    @property
    def engine_pid(self) -> int:
        (pid,) = children(self.process.pid)
        return pid


@contextlib.contextmanager
def serving(
    log: Path,
    *flags: str,
    model: str | None = EMBEDDED,
    ready_within: float = 2 * PATIENCE,
    context: ssl.SSLContext | None = None,
    command: Sequence[str] = (sys.executable, "-m", "penstock", "serve"),
    port: int | None = None,
) -> Iterator[Server]:
    """`penstock serve` until the block ends. It must have left no process behind by then. With `context` it is asked
    over TLS. `command` is for a server with faults. Without `model`, the flags say which it is. Without `port`, the
    server gets a free one."""
    port = port or free_port()
    command = [*command, *([] if model is None else [model])]
    # What an earlier server on this port has stored is not for this one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": f"{log}-state"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            bound([*command, "--port", str(port), "--threads", "1", *flags]),
            stdout=sink,
            stderr=sink,
            env=environment,
            start_new_session=True,
        )
    server = Server(process, port, log, context)
    engines: list[int] = []
    try:

        def ready() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"the server ended with {process.returncode}:\n{log.read_text()}")
            return status(server.url + "/readyz", context) == 200

        wait_for(ready, f"the server to be ready; so far:\n{log.read_text()}", ready_within)
        engines = children(process.pid)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the server did not end on SIGTERM:\n{log.read_text()}") from None
        wait_for(lambda: not any(map(alive, engines)), "the engine process to end")
