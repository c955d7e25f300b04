"""`penstock simulate --serve`: the page, runs one at a time, and its limits."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.simulate import live
from penstock.cli.simulate.live import Commanded, LiveRuns
from penstock.simulate.prices import load_prices
from tests.cli.uses.right_uses import SIMULATOR
from tests.patience import wait_for


@contextlib.contextmanager
def serving(*words: str) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "penstock", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            found = re.match(r"open (http://127.0.0.1:\d+) in a browser", line)
            assert found, (line, process.stderr.read() if not line else "")
            with httpx.Client(base_url=found[1], timeout=60) as client:
                yield client
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130 and process.stderr.read() == ""
        finally:
            process.kill()


def state(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/report").json()
    return found


def test_a_run_has_the_report_of_json(tmp_path: Path) -> None:
    file = tmp_path / "batching.json"
    done = [sys.executable, "-m", "penstock", "simulate", "batching", "--json", str(file)]
    subprocess.run(done, check=True, capture_output=True, timeout=120)
    with serving(*SIMULATOR.split()) as client:
        wait_for(lambda: state(client)["status"] == "done", "the run of the command line")
        assert state(client)["report"] == json.loads(file.read_text())
        page = client.get("/")
        assert "connect-src 'self'" in page.text and "kv-pages" in page.text
        answer = client.post("/run", json={"scenario": "batching", "seed": 7})
        assert answer.status_code == 202
        wait_for(lambda: state(client)["status"] == "done", "the second run")
        assert state(client)["report"]["seed"] == 7


def test_one_run_at_a_time_grows_and_can_be_stopped() -> None:
    with serving("simulate", "--serve", "--port", "0") as client:
        assert state(client) == {"status": "idle"}
        asked = {"scenario": "chaos", "duration": 100000}
        assert client.post("/run", json=asked).status_code == 202
        second = client.post("/run", json=asked)
        assert second.status_code == 409 and second.json() == {"error": "a simulation is going on: stop it first"}
        wait_for(lambda: "report" in state(client), "a report of a run that goes on")
        first = next(iter(state(client)["report"]["variants"].values()))["figures"]["requests"]
        wait_for(
            lambda: next(iter(state(client)["report"]["variants"].values()))["figures"]["requests"] > first,
            "the report to grow",
        )
        assert client.post("/stop", json={}).status_code == 202
        wait_for(lambda: state(client)["status"] == "stopped", "the run to stop")
        assert state(client)["text"].startswith("stopped at ") and state(client)["report"]["variants"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"scenario": "/etc/passwd"}', 400, "'/etc/passwd' is not offered: name one of batch-size"),
        (b'{"scenario": "chaos", "duration": 0}', 400, "duration 0: give 0.001 to 10000000 seconds"),
        (b'{"scenario": "chaos", "seed": -1}', 400, "seed -1: give a whole number from 0"),
        (b'{"scenario": "chaos", "rate": 1}', 400, "unknown field `rate`"),
        (b"{", 400, "truncated"),
        (b" " * 5000, 413, "the body has 5000 bytes: send at most 4096"),
    ],
)
def test_a_wrong_command(body: bytes, status: int, says: str, simulator: httpx.Client) -> None:
    answer = simulator.post("/run", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and says in answer.json()["error"], answer.text
    assert state(simulator) == {"status": "idle"}


def test_other_sites_cannot_begin_a_run(simulator: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = simulator.post("/run", content=b'{"scenario": "batching"}', headers={"content-type": kind})
        assert answer.status_code == 415
    assert simulator.options("/run").status_code == 501
    assert state(simulator) == {"status": "idle"}


@pytest.fixture(scope="module")
def simulator() -> Iterator[httpx.Client]:
    with serving("simulate", "--serve", "--port", "0") as client:
        yield client


@pytest.mark.parametrize(("limit", "most"), [("MOST_REQUESTS", 300), ("MOST_SECONDS", 0.2)])
def test_a_scenario_that_is_too_large_ends_with_what_to_do(
    limit: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, limit, most)
    runs = LiveRuns(None, None, load_prices())
    assert runs.begin(Commanded("chaos", duration=100000.0))
    wait_for(lambda: runs.state["status"] == "stopped", "the limit")
    assert "chaos takes more than" in runs.state["text"] and "give a shorter duration" in runs.state["text"]


def test_a_trace_that_is_missing_is_said_on_the_page() -> None:
    runs = LiveRuns(None, None, load_prices())
    assert runs.begin(Commanded("mooncake"))
    wait_for(lambda: runs.state["status"] == "stopped", "the error")
    assert "mooncake_conversation.jsonl cannot be read" in runs.state["text"]


def test_files_are_not_written_beside_the_page() -> None:
    command = [sys.executable, "-m", "penstock", "simulate", "batching", "--serve", "--json", "a", "--html", "b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "penstock: --serve shows runs in the browser only: leave out --json and --html\n"
