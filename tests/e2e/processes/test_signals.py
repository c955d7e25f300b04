"""Signals as they come in practice: to a whole process group, twice, from a terminal, and at its end."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.weights.packaged import EMBEDDED
from tests.e2e.server import Server, gauge, serving, status
from tests.engine.processes import alive, children
from tests.patience import AT_ONCE, PATIENCE, wait_for
from tests.ports import free_port

STREAMS, TOKENS = 40, 200
# Drafts of what was said before would end streams too soon.
FLAGS = ("--speculation", "off", "--max-num-seqs", "64", "--kv-cache-memory", "64MiB", "--max-model-len", "1024")
FLAGS += ("--drain-timeout", f"{PATIENCE:g}")  # a busy machine needs longer than usual
SECRET = "hf_0123456789abcdef"


class Stream(threading.Thread):
    """A streamed completion, read to its end. Plain sockets: 40 clients with TLS contexts would take seconds."""

    def __init__(self, server: Server, tokens: int) -> None:
        super().__init__(daemon=True)
        self.port = int(server.url.rpartition(":")[2])
        self.body = {"prompt": "import os\n", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        self.events: list[str] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
        self.events = connection.getresponse().read().decode().split("\n\n")[:-1]


def started(server: Server, count: int, tokens: int) -> list[Stream]:
    streams = [Stream(server, tokens) for _ in range(count)]
    for stream in streams:
        stream.start()

    def run() -> bool:
        with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as answer:
            return gauge(answer.read().decode(), "penstock_num_requests_running") >= count

    wait_for(run, "the streams to run")
    return streams


def finished(streams: list[Stream]) -> None:
    """Waits for all streams, which must have ended with the last token."""
    for stream in streams:
        stream.join(PATIENCE)
        last, done = stream.events[-2:]
        assert done == "data: [DONE]" and json.loads(last[6:])["choices"][0]["finish_reason"] == "length"


def test_sigterm_to_the_group_lets_streams_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server with two ranks, which hold no secret."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with serving(tmp_path / "log", *FLAGS, "--tensor-parallel-size", "2") as server:
        engine = server.engine_pid
        group = [server.process.pid, engine, *children(engine)]
        held = [SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in group]
        assert held == [True, False, False, False]
        streams = started(server, STREAMS, TOKENS)
        os.killpg(server.process.pid, signal.SIGTERM)
        finished(streams)
        assert server.process.wait(PATIENCE) == 0
        assert not any(map(alive, group))
    log = server.log.read_text()
    assert f"stopping: {STREAMS} requests in flight have {PATIENCE:g} s to finish (--drain-timeout)" in log
    assert "WARNING" not in log and "ERROR" not in log


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stopping_server_answers_until_load_balancers_have_noticed(tmp_path: Path, processes: int) -> None:
    delay = 4.0
    flags = ("--api-processes", str(processes), "--shutdown-delay", f"{delay:g}")
    with serving(tmp_path / "log", *FLAGS, *flags) as server:
        signalled = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: status(server.url + "/readyz") == 503, "the server not to be ready", delay)
        while time.monotonic() - signalled < delay / 2:
            late = Stream(server, 4)
            late.run()
            assert late.events[-1] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0
        assert time.monotonic() - signalled >= delay
    assert server.log.read_text().count("(--shutdown-delay)") == processes


@pytest.mark.parametrize("launcher", ["timeout", pytest.param("make", marks=pytest.mark.rare)])
def test_a_launcher_that_passes_the_signal_on_does_not_end_the_wait(tmp_path: Path, launcher: str) -> None:
    """`timeout` signals its child and then its group; `make` passes on what its group has received, too."""
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", EMBEDDED, "--port", str(port), "--threads", "1", *FLAGS]
    makefile = tmp_path / "Makefile"
    makefile.write_text(f"serve:\n\t@{' '.join(command)}\n")
    starts = {"timeout": ["timeout", "600", *command], "make": ["make", "-f", str(makefile), "serve"]}
    with running(starts[launcher], tmp_path / "log", port) as (server, penstock):
        streams = started(server, STREAMS, TOKENS)
        if launcher == "timeout":
            server.process.send_signal(signal.SIGTERM)
        else:
            os.killpg(server.process.pid, signal.SIGTERM)
        finished(streams)
        wait_for(lambda: not alive(penstock), "the server to end")
        assert server.process.wait(PATIENCE) == {"timeout": 0, "make": -signal.SIGTERM}[launcher]
    assert "aborted" not in server.log.read_text()


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, port: int) -> Iterator[tuple[Server, int]]:
    """A launcher in a session of its own, and the pid of the server that it started."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    server = Server(process, port, log)
    try:
        wait_for(lambda: status(server.url + "/readyz") == 200, f"the server to be ready: {log.read_text()}")
        (penstock,) = children(process.pid)
        yield server, penstock
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def at_a_terminal(log: Path) -> Iterator[tuple[Server, int]]:
    """A server with a terminal of its own, and the terminal's other end, which the block may close."""
    port = free_port()
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "penstock", "serve", EMBEDDED, "--port", str(port), "--threads", "1", *FLAGS]
    process = subprocess.Popen(command, preexec_fn=lambda: os.login_tty(theirs), pass_fds=(theirs,))
    os.close(theirs)

    def read() -> None:
        with contextlib.suppress(OSError), log.open("wb") as file:  # the terminal is gone
            while data := os.read(ours, 4096):
                file.write(data)
                file.flush()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    server = Server(process, port, log)
    try:
        wait_for(lambda: status(server.url + "/readyz") == 200, "the server to be ready")
        yield server, ours
    finally:
        process.kill()
        process.wait()


def test_the_end_of_its_terminal_ends_no_stream(tmp_path: Path) -> None:
    with at_a_terminal(tmp_path / "log") as (server, terminal):
        engine = server.engine_pid
        streams = started(server, 4, TOKENS)
        os.close(terminal)  # the kernel sends SIGHUP to the whole group
        finished(streams)
        assert status(server.url + "/readyz") == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert not alive(engine)


def test_the_first_interrupt_waits_for_streams_and_the_second_does_not(tmp_path: Path) -> None:
    with at_a_terminal(tmp_path / "log") as (server, terminal):
        engine = server.engine_pid
        streams = started(server, STREAMS, 900)
        os.write(terminal, b"\x03")
        wait_for(lambda: status(server.url + "/readyz") == 503, "the server to refuse requests")
        time.sleep(1.2)
        assert all(stream.is_alive() for stream in streams)
        os.write(terminal, b"\x03")
        began = time.monotonic()
        assert server.process.wait(PATIENCE) == 0
        assert time.monotonic() - began < AT_ONCE  # a second on an idle machine
        assert not alive(engine)
        for stream in streams:
            stream.join(PATIENCE)
            error, done = stream.events[-2:]
            assert done == "data: [DONE]" and json.loads(error[6:])["error"]["code"] == "engine_unavailable"
    assert f"{STREAMS} requests are aborted, as a second signal came" in server.log.read_text()
