"""Processes killed under load: the survivors notice, say so, and leave nothing behind."""

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, alive, gauge, serving, status, wait_for

FLAGS = ("--max-num-seqs", "16", "--kv-cache-memory", "64MiB", "--threads", "1")  # others compute here as well
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
        body["model"] = httpx.get(self.server.url + "/v1/models").json()["data"][0]["id"]
        try:
            with httpx.stream("POST", self.server.url + "/v1/completions", json=body, timeout=60) as answer:
                self.lines.extend(line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            self.broken = error
        self.ended = time.monotonic()


def started(server: Server, count: int, max_tokens: int = 1800) -> list[Stream]:
    """Streams that run. By themselves they end only after a long time."""
    streams = [Stream(server, max_tokens) for _ in range(count)]
    for stream in streams:
        stream.start()
    wait_for(lambda: running(server) >= count, 30, "the streams to run")
    return streams


def running(server: Server) -> float:
    return gauge(httpx.get(server.url + "/metrics").text, "penstock_num_requests_running")


def test_killing_the_engine_ends_every_stream_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *FLAGS) as server:
        streams = started(server, 8)
        killed = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_for(lambda: status(server.url + "/readyz") == 503, 2, "readiness to turn false")
        for stream in streams:
            stream.join(10)
            assert stream.broken is None
            assert stream.ended - killed < 2.5
            assert stream.lines[-1] == "data: [DONE]"
            assert stream.lines[-2].startswith(ERROR)
        refused = httpx.post(server.url + "/v1/completions", json={"model": "x", "prompt": "x"})
        assert refused.status_code in (404, 503)
        assert running(server) == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 1
    assert "penstock: the engine ended before the server was stopped" in server.log.read_text()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_killing_the_server_ends_the_engine(tmp_path: Path, busy: bool) -> None:
    with serving(tmp_path / "log", *FLAGS) as server:
        engine = server.engine_pid
        if busy:
            started(server, 4)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: not alive(engine), 2, "the engine to end")


def test_sigterm_lets_what_is_in_flight_finish(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *FLAGS) as server:
        streams = started(server, 2, max_tokens=400)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.join(60)
            assert stream.broken is None
            assert stream.lines[-1] == "data: [DONE]"
            assert not [line for line in stream.lines if line.startswith(ERROR)]
        assert server.process.wait(20) == 0
