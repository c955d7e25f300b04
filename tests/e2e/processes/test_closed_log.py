"""A server whose standard streams are closed, or whose log cannot be written from the start."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from penstock.weights.packaged import EMBEDDED
from tests.e2e.bound import bound
from tests.e2e.server import status
from tests.engine.processes import children
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port

Server = tuple[subprocess.Popen[bytes], str]


@contextlib.contextmanager
def serving(*flags: str, closed: tuple[int, ...] = (), log: int | None = None) -> Iterator[Server]:
    """A server in which the descriptors `closed` are closed. `log` is its standard output and error."""
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", EMBEDDED, "--port", str(port), "--threads", "1"]

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    process = subprocess.Popen(
        bound([*command, "--state-dir", "none", *flags]),
        stdout=subprocess.DEVNULL if log is None else log,
        stderr=subprocess.DEVNULL if log is None else log,
        preexec_fn=close,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: process.poll() is not None or status(url + "/readyz") == 200, "the server")
        assert process.poll() is None, f"it ended with status {process.returncode}"
        yield process, url
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    body = {"prompt": "x", "max_tokens": 3}
    return httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize("flags", [(), ("--api-processes", "2")])
def test_closed_streams_are_no_sockets(flags: tuple[str, ...]) -> None:
    with serving(*flags, closed=(0, 1, 2)) as (process, url):
        assert answers(url)
        for pid in (process.pid, *children(process.pid)):
            for descriptor in (1, 2):
                assert Path(f"/proc/{pid}/fd/{descriptor}").readlink() == Path(os.devnull)


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def pipe_without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def pipe_that_is_full() -> int:
    _, writer = os.pipe()  # its reader reads nothing
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    return writer


@pytest.mark.parametrize("log", [full_disk, pipe_without_reader, pipe_that_is_full])
def test_it_starts_and_its_engine_is_started_again(log: Callable[[], int]) -> None:
    descriptor = log()
    try:
        with serving(log=descriptor) as (process, url):
            assert answers(url)
            (engine,) = children(process.pid)
            os.kill(engine, signal.SIGKILL)
            assert answers(url)
    finally:
        os.close(descriptor)
