"""The processes of examples: on a pipe, or in a terminal with a user who types."""

import os
import pty
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.e2e.bound import bound
from tests.e2e.terminal import take_terminal

PATIENCE = 120.0  # seconds for a command
SMALL = {
    "PENSTOCK_THREADS": "1",
    "PENSTOCK_KV_CACHE_MEMORY": "512MiB",
}  # for what makes an engine: tests share a machine


class ExampleFailed(AssertionError):
    """A command of a page did not do what the page says; the message has its output."""


def on_a_pipe(words: list[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs a command. Returns its exit status and its output."""
    process = subprocess.Popen(
        bound(words),
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        kill(process)
        raise ExampleFailed(f"did not end within {PATIENCE:.0f} s") from None
    return process.returncode, output


def in_terminal(words: list[str], folder: Path, environment: Mapping[str, str], keys: bytes) -> tuple[int, str]:
    """Runs a command in a terminal whose user types these keys when something has appeared, until it ends."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        bound(words),
        cwd=folder,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    said: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the terminal's other end is closed
            while data := os.read(ours, 4096):
                said.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        if said:
            with suppress(OSError):
                os.write(ours, keys)
    if process.poll() is None:
        kill(process)
        raise ExampleFailed(f"did not end within {PATIENCE:.0f} s")
    reader.join(5)
    os.close(ours)
    return process.returncode, b"".join(said).decode(errors="replace")


def kill(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
