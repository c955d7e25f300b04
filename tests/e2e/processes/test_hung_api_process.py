"""An API process that hangs: the supervisor notices, and another one takes its place and its connections."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes.test_api_processes import api_pids
from tests.e2e.server import Server, serving
from tests.engine.processes import alive
from tests.patience import PATIENCE, wait_for

SOON = """
from penstock.cli.serving import process_slot
process_slot.LOOK_SECONDS, process_slot.COUNT_SECONDS = 0.3, 0.5
from penstock.__main__ import main
main()
"""
FLAGS = ("--api-processes", "2", "--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--state-dir", "none")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "log", *FLAGS, command=(sys.executable, "-c", SOON, "serve")) as running:
        yield running


def test_a_process_that_is_stopped_is_replaced(server: Server) -> None:
    time.sleep(3.0)  # so that each has been looked at
    stopped = api_pids(server)[1]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    for _ in range(20):  # half of them come to the process that hangs, and are answered by the next one
        with httpx.Client(timeout=PATIENCE, verify=False) as client:
            body = {"prompt": "x", "max_tokens": 3}
            try:
                assert client.post(server.url + "/v1/completions", json=body).status_code == 200
            except (httpx.RemoteProtocolError, httpx.ReadError):
                pass  # it had been accepted
    wait_for(lambda: not alive(stopped), "the process to be killed")
    assert time.monotonic() - began < PATIENCE / 2
    wait_for(lambda: len(api_pids(server)) == 2, "another process")
    log = server.log.read_text()
    assert log.count("has not answered its supervisor") == 1
    assert "API process 1 was killed by SIGKILL; it is started again" in log
    assert "out of memory" not in log
