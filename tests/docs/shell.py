"""Runs the commands of a page, one after the other, as a reader would type them.

The port of a server is changed to one that is free, in the command that starts it and in all that address it. A server
runs until the next one is started or the page ends. `make serve` runs `penstock serve`: it has been installed.
"""

import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.e2e.bound import bound
from tests.e2e.server import free_port, status, wait_for

PATIENCE = 120.0  # seconds for a command
PORT = "8000"
SMALL = {
    "PENSTOCK_THREADS": "1",
    "PENSTOCK_KV_CACHE_MEMORY": "512MiB",
}  # for what makes an engine: tests share a machine
SHORT = {"PENSTOCK_MAX_MODEL_LEN": "1024"}  # for servers of text: an answer without max_tokens may be long

_SERVE = re.compile(r"(?:\S*/)?penstock serve\b")
_SERVES = re.compile(r"(?:\w+=\S+ +)*(?:(?:\S*/)?penstock|make) serve\b")
_MAKES_ENGINE = re.compile(r"\bpenstock (serve|run|bench (throughput|latency|quality))\b")
_RUNS = re.compile(r"(?:\S*/)?penstock run\b[^|<]*")
_ADDRESS = re.compile(r"\b(127\.0\.0\.1|localhost|0\.0\.0\.0):(\d{2,5})\b")
_BENCH = re.compile(r"\bpenstock bench serve\b")


class ExampleFailed(AssertionError):
    """A command of a page did not do what the page says; the message has its output."""


class Served:
    """A server of an example. `port` is the free port that takes the place of `written`, the port in the page."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.port = free_port()
        self.written, self.log = PORT, log
        command = re.sub(
            r"\bmake serve\b(?: +ARGS=\"([^\"]*)\")?", lambda found: f"penstock serve {found[1] or ''}", command
        )
        command = command.rstrip("& ")
        if named := re.search(r"--port[ =](\d+)", command):
            self.written = named[1]
            command = command.replace(named[0], f"--port {self.port}")
        else:
            command = _SERVE.sub(rf"\g<0> --port {self.port}", command)
        command = _SERVE.sub(r"exec \g<0>", command)
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                bound(["bash", "-c", command]),
                cwd=folder,
                env={**environment, **SMALL, **({} if "minilm" in command else SHORT)},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        try:
            wait_for(self.is_ready, PATIENCE, "the server to be ready")
        except BaseException:
            self.close()
            raise

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise ExampleFailed(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")
        return status(f"http://127.0.0.1:{self.port}/readyz") == 200

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            _kill(self.process)
            raise ExampleFailed(f"the server did not end on SIGTERM:\n{self.log.read_text()}") from None


class Shell:
    """Runs commands in one folder. Exported variables and `cd` last; `default` starts the server that a page without
    one of its own addresses."""

    def __init__(self, folder: Path, environment: Mapping[str, str], default: Callable[[], Served]) -> None:
        self.folder = folder
        self.environment = dict(environment)
        self.default = default
        self.served: Served | None = None
        self.servers = 0

    def close(self) -> None:
        if self.served is not None:
            self.served.close()
            self.served = None

    def python(self, code: str) -> None:
        """Runs a Python example. Raises ExampleFailed if it fails."""
        script = self.folder / "example.py"
        script.write_text(self.addressed(code))
        self.finish(["python", str(script)])

    def run(self, command: str, *, fails: bool = False) -> None:
        """Runs a shell command. Raises ExampleFailed unless it ends with 0, or with another status if it `fails`."""
        if _SERVES.match(command) and not fails:
            self.close()
            self.servers += 1
            log = self.folder / f"server-{self.servers}.log"
            self.served = Served(command, self.folder, self.environment, log)
        elif re.match(r"(export|unset|cd|source|\.) ", command):
            self.change(command)
        else:
            words = ["bash", "-o", "pipefail", "-c", self.addressed(command)]
            self.finish(words, terminal=bool(_RUNS.fullmatch(command)), fails=fails)

    def addressed(self, text: str) -> str:
        """The text with the ports of its servers changed to those where they listen."""
        if not (_ADDRESS.search(text) or _BENCH.search(text)):
            return text
        served = self.served or self.default()
        if _BENCH.search(text) and "--url" not in text:
            text = _BENCH.sub(f"penstock bench serve --url http://127.0.0.1:{served.port}", text)
        return _ADDRESS.sub(lambda found: f"127.0.0.1:{served.port}" if found[2] == served.written else found[0], text)

    def change(self, command: str) -> None:
        """Runs a command that changes the shell itself."""
        done = subprocess.run(
            ["bash", "-c", f"{command}\npwd; env -0"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ExampleFailed(done.stderr)
        folder, _, variables = done.stdout.partition("\n")
        self.folder = Path(folder)
        self.environment = dict(entry.split("=", 1) for entry in variables.split("\0") if "=" in entry)

    def finish(self, words: list[str], *, terminal: bool = False, fails: bool = False) -> None:
        environment = self.environment
        if _MAKES_ENGINE.search(words[-1]):
            environment = {**SMALL, **environment}
        status, output = (
            _in_terminal(words, self.folder, environment) if terminal else _piped(words, self.folder, environment)
        )
        if (status != 0) != fails:
            wanted = "an exit status other than 0" if fails else "0"
            raise ExampleFailed(f"ended with {status}, expected {wanted}:\n{output[-3000:]}")


def _piped(words: list[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
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
        _kill(process)
        raise ExampleFailed(f"did not end within {PATIENCE:.0f} s") from None
    return process.returncode, output


def _in_terminal(words: list[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs a command in a terminal whose user types nothing but Ctrl-D."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        bound(words),
        cwd=folder,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
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
        with suppress(OSError):
            os.write(ours, b"\x04")
    if process.poll() is None:
        _kill(process)
        raise ExampleFailed(f"did not end within {PATIENCE:.0f} s")
    reader.join(5)
    os.close(ours)
    return process.returncode, b"".join(said).decode(errors="replace")


def _kill(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
