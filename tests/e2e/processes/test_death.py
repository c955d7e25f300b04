"""Processes killed under load: the survivors notice, say so, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.weights.packaged import embedded_model
from tests.e2e.server import Server, gauge, serving, status
from tests.e2e.terminal import without_waiting
from tests.engine.processes import alive, children
from tests.patience import PATIENCE, wait_for

FLAGS = ("--max-num-seqs", "16", "--kv-cache-memory", "64MiB", "--threads", "1")  # others compute here as well
FLAGS += ("--speculation", "off")  # drafts of what was said before would end streams too soon
PATIENT = ("--drain-timeout", f"{PATIENCE:g}")  # for streams to end on a busy machine
ERROR = 'data: {"error":'  # how an event begins that is one; a model may well write the word


class Stream(threading.Thread):
    """A streamed completion, read to its end."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.max_tokens = max_tokens
        self.lines: list[str] = []
        self.broken: Exception | None = None
        self.ended = 0.0

    def run(self) -> None:
        body = {"prompt": "import os\n", "max_tokens": self.max_tokens, "stream": True, "ignore_eos": True}
        body["model"] = self.server.get("/v1/models").json()["data"][0]["id"]
        try:
            url = self.server.url + "/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=PATIENCE, verify=False) as answer:
                # A comment is a heartbeat: on a busy machine an engine may take long to start again.
                self.lines.extend(line for line in answer.iter_lines() if line and not line.startswith(":"))
        except httpx.HTTPError as error:
            self.broken = error
        self.ended = time.monotonic()


def started(server: Server, count: int, max_tokens: int = 1800) -> list[Stream]:
    """Streams that run: each has a token. By themselves they end only after a long time."""
    streams = [Stream(server, max_tokens) for _ in range(count)]
    for stream in streams:
        stream.start()
    wait_for(lambda: all(stream.lines or stream.broken for stream in streams), "the streams to run")
    return streams


def running(server: Server) -> float:
    return gauge(server.get("/metrics").text, "penstock_num_requests_running")


@pytest.fixture(scope="module")
def restarting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engines die. It ends well in spite of that."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, *FLAGS, "--step-deadline", "3", "--seed", "7") as server:
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def undisturbed(restarting: Server) -> list[str]:
    return texts(started(restarting, 8, max_tokens=600))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_when_the_engine_is_killed_or_stopped(
    restarting: Server, undisturbed: list[str], number: signal.Signals
) -> None:
    restarts = engine_restarts(restarting)
    streams = started(restarting, 8, max_tokens=600)
    os.kill(restarting.engine_pid, number)
    assert all(stream.is_alive() for stream in streams)
    wait_for(lambda: status(restarting.url + "/readyz") == 503, "readiness to turn false")
    assert status(restarting.url + "/livez") == 200
    wait_for(lambda: status(restarting.url + "/readyz") == 200, "another engine")
    assert texts(streams) == undisturbed
    assert engine_restarts(restarting) == restarts + 1
    assert running(restarting) == 0


def engine_restarts(server: Server) -> float:
    return gauge(server.get("/metrics").text, "penstock_engine_restarts_total")


def texts(streams: list[Stream]) -> list[str]:
    """What the streams say, all of them to their end and without an error."""
    found = []
    for stream in streams:
        stream.join(PATIENCE)
        assert stream.broken is None
        assert stream.lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in stream.lines[:-1]]
        assert not [event for event in events if "error" in event]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        found.append("".join(event["choices"][0]["text"] for event in events))
    return found


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_killing_the_server_ends_the_engine(tmp_path: Path, busy: bool) -> None:
    with serving(tmp_path / "log", *FLAGS) as server:
        engine = server.engine_pid
        if busy:
            started(server, 4)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: not alive(engine), "the engine to end")


def test_sigterm_lets_what_is_in_flight_finish(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *FLAGS, *PATIENT) as server:
        streams = started(server, 2, max_tokens=1000)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.join(PATIENCE)
            assert stream.broken is None
            assert stream.lines[-1] == "data: [DONE]"
            assert not [line for line in stream.lines if line.startswith(ERROR)]
        assert server.process.wait(PATIENCE) == 0
    assert "stopping: 2 requests in flight" in server.log.read_text()


def test_run_says_once_that_its_engine_died() -> None:
    command = [sys.executable, "-m", "penstock", "run", str(embedded_model()), "import os\n", "--max-tokens", "1800"]
    with subprocess.Popen([*command, *FLAGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it writes
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        told = process.communicate(timeout=PATIENCE)[1].decode()
    assert process.returncode == 1
    assert (
        without_waiting(told)
        == "penstock: the engine process was killed by SIGKILL: the machine may be out of memory\n"
    )


def test_no_server_of_these_tests_outlives_them() -> None:
    code = (
        "import subprocess; from tests.e2e.bound import bound\n"
        "print(subprocess.Popen(bound(['sleep', '60'])).pid, flush=True)\n"
        "input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = int(process.stdout.readline())
        wait_for(lambda: Path(f"/proc/{started}/comm").read_text() == "sleep\n", "the command to start")
        process.kill()
    wait_for(lambda: not alive(started), "the command to end")
