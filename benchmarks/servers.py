"""Servers that a benchmark starts: their ports, when they are ready, and their end with it."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx

from penstock.engine.child import die_with_parent

READY_SECONDS = 120.0


def free_port() -> int:
    """A port of the loopback address that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that the kernel kills when the benchmark's main thread has ended, also by a signal."""
    return subprocess.Popen(command, preexec_fn=die_with_parent, **options)


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """The server that a command starts, from when it is ready. It is killed at the end if it runs."""
    server = start(command, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            end = time.monotonic() + READY_SECONDS
            while not is_ready(client):
                if server.poll() is not None or time.monotonic() > end:
                    raise ValueError("the server does not become ready")
                time.sleep(0.05)
            yield client, server
    finally:
        server.kill()
        server.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
