"""`penstock serve --engines`, `--replicas` and `penstock fleet`, as a user has them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.bound import bound
from tests.e2e.fleet.engines import KEY, EngineHostProcess, engines
from tests.e2e.server import Server, gauge, serving, status
from tests.engine.processes import children
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_FLEET_KEY": KEY}
# A front must not import torch, nor what computes.
FORBIDDEN = """
import sys
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith(("penstock.runtime", "penstock.models")):
            raise ImportError(f"a front imports {name}")
sys.meta_path.insert(0, Forbidden())
from penstock.__main__ import main
main()
"""


@contextlib.contextmanager
def fronting(log: Path, addresses: str, *flags: str, ends_with: int = 0) -> Iterator[Server]:
    """A front without an engine, until the block ends. `ends_with` is the status with which it must end."""
    port = free_port()
    command = [sys.executable, "-c", FORBIDDEN, "serve", "--engines", addresses, "--port", str(port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            bound([*command, "--state-dir", "none", *flags]), stdout=sink, stderr=sink, env=ENVIRONMENT
        )
    server = Server(process, port, log)
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            return status(server.url + "/readyz") == 200

        wait_for(ready, "the front to be ready")
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == ends_with, log.read_text()


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, env={**ENVIRONMENT, "COLUMNS": "160"}, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineHostProcess]]:
    with engines(tmp_path_factory.mktemp("engines"), 2) as running:
        yield running


BODY = {"model": "python-8m", "prompt": "def add(a, b):\n", "max_tokens": 150, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, Any]:
    """The answer of a server with an engine of its own."""
    answer: dict[str, Any] = server.post("/v1/completions", BODY).json()
    assert server.get("/v1/models").json()["data"][0]["id"] == "python-8m"
    return answer


def test_a_front_has_the_answers_of_a_server_with_an_engine(
    hosts: list[EngineHostProcess], expected: dict[str, Any], tmp_path: Path
) -> None:
    with fronting(tmp_path / "front", ",".join(host.address for host in hosts)) as front:
        assert children(front.process.pid) == [], "it has no engine"
        answer = front.post("/v1/completions", BODY).json()
        assert answer["choices"] == expected["choices"]
        assert answer["system_fingerprint"] == expected["system_fingerprint"]
        assert front.get("/v1/models").json()["data"][0]["id"] == "python-8m"
        text = front.get("/metrics").text
        assert gauge(text, "penstock_replica_requests_total") == 1
        assert text.count('status="ready"} 1.0') == 2
        assert gauge(text, "penstock_engine_healthy") == 1
        shown = penstock("top", front.url, "--once", "--interval", "0.2")
        assert shown.returncode == 0 and all(host.address in shown.stdout for host in hosts), shown


def test_a_front_also_has_models_of_providers(
    hosts: list[EngineHostProcess], expected: dict[str, Any], tmp_path: Path
) -> None:
    """The provider is another front."""
    addresses, file = ",".join(host.address for host in hosts), tmp_path / "providers.yaml"
    with fronting(tmp_path / "behind", addresses) as behind:
        entry = {"url": f"{behind.url}/v1", "private": True, "accepts": ["completions", "ignore_eos"]}
        entry["models"] = {"there": {"model": "python-8m"}}
        file.write_text(json.dumps({"providers": {"behind": entry}, "fallbacks": {"python-8m": ["there"]}}))
        with fronting(tmp_path / "front", addresses, "--providers", str(file)) as front:
            for model in ("python-8m", "there"):
                answer = front.post("/v1/completions", {**BODY, "model": model}).json()
                assert answer["choices"] == expected["choices"] and answer["model"] == model
            assert gauge(front.get("/metrics").text, "penstock_provider_requests_total") == 1


def test_a_repository_does_not_go_with_engines_elsewhere(tmp_path: Path) -> None:
    ended = penstock("serve", "--repository", str(tmp_path), "--engines", "127.0.0.1:1", "--port", str(free_port()))
    assert ended.returncode and "does not go with --engines" in ended.stderr, ended


def test_a_stream_goes_on_when_its_engine_is_killed(hosts: list[EngineHostProcess], tmp_path: Path) -> None:
    with fronting(tmp_path / "front", ",".join(host.address for host in hosts)) as front:
        expected = front.post("/v1/completions", {**BODY, "max_tokens": 400}).json()["choices"][0]["text"]
        body, text, killed = {**BODY, "max_tokens": 400, "stream": True}, "", False
        with httpx.stream("POST", front.url + "/v1/completions", json=body, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    if len(text) > 40 and not killed:
                        killed = True
                        for host in hosts[:1] if f'replica="{hosts[0].address}"}} 1' in _open(front) else hosts[1:]:
                            os.kill(host.engine_pid, signal.SIGKILL)
        assert killed and text == expected
        assert gauge(front.get("/metrics").text, "penstock_fleet_moves_total") == 1
        wait_for(lambda: front.get("/metrics").text.count('status="ready"} 1.0') == 2, "it to be back")


def _open(front: Server) -> str:
    lines = front.get("/metrics").text.splitlines()
    return "\n".join(line for line in lines if line.startswith("penstock_replica_requests_open"))


def test_a_front_that_is_killed_leaves_nothing_at_the_engines(hosts: list[EngineHostProcess], tmp_path: Path) -> None:
    """The other front does not notice it, and the engines do not compute what nobody reads."""
    addresses = ",".join(host.address for host in hosts)
    with (
        fronting(tmp_path / "front", addresses) as front,
        fronting(tmp_path / "killed", addresses, ends_with=-signal.SIGKILL) as killed,
    ):
        expected, before = front.post("/v1/completions", BODY).json()["choices"], computed(front)
        body = {**BODY, "max_tokens": 1500, "n": 16, "temperature": 1.0, "stream": True}
        with httpx.stream("POST", killed.url + "/v1/completions", json=body, timeout=PATIENCE) as answer:
            next(answer.iter_lines())
            killed.process.kill()
        wait_for(
            lambda: any(
                re.search("front .* has left: the connection was lost", host.log.read_text()) for host in hosts
            ),
            "the engine to see it",
        )
        wait_for(lambda: not running(front), "what it has sent to be aborted")
        assert computed(front) - before < 16 * 1500 / 2
        assert front.post("/v1/completions", BODY).json()["choices"] == expected


def running(front: Server) -> float:
    """The sequences that run in the engines."""
    return gauge(front.get("/metrics").text, "penstock_num_requests_running")


def computed(front: Server) -> float:
    """The tokens that the engines have computed so far."""
    return gauge(front.get("/metrics").text, "penstock_engine_decode_tokens_total")


def test_the_commands_for_operators(hosts: list[EngineHostProcess], tmp_path: Path) -> None:
    shown = penstock("fleet", "status", ",".join(host.address for host in hosts))
    assert shown.returncode == 0 and shown.stdout.count("ready") == 2 and "python-8m" in shown.stdout, shown
    absent = f"127.0.0.1:{free_port()}"
    shown = penstock("fleet", "status", f"{hosts[0].address},{absent}")
    assert shown.returncode == 1 and "cannot be reached" in shown.stdout.replace("\n", " "), shown
    wrong = penstock("fleet", "status", hosts[0].address, "--fleet-key", "another")
    assert wrong.returncode == 1 and "key" in wrong.stdout
    assert "HOST:PORT" in penstock("fleet", "drain", "nowhere").stderr


def test_a_drained_engine_ends_when_its_streams_have(tmp_path: Path) -> None:
    with engines(tmp_path, 1) as (host,), fronting(tmp_path / "front", host.address) as front:
        answers = []
        body = {**BODY, "max_tokens": 400, "n": 16, "temperature": 1.0}
        asking = threading.Thread(target=lambda: answers.append(front.post("/v1/completions", body)))
        asking.start()
        wait_for(lambda: running(front), "it to run")
        drained = penstock("fleet", "drain", host.address, "--grace", "60")
        assert drained.returncode == 0 and "drains" in drained.stdout, drained
        asking.join(PATIENCE)
        assert answers[0].json()["usage"]["completion_tokens"] == 16 * 400
        assert host.process.wait(PATIENCE) == 0
        assert "requests, which may stay for 60 s" in host.log.read_text()


def test_replicas_on_one_machine(expected: dict[str, Any], tmp_path: Path) -> None:
    with serving(tmp_path / "two", "--replicas", "2", "--kv-cache-memory", "64MiB") as server:
        pids = children(server.process.pid)
        assert len(pids) == 2
        assert sorted(len(os.sched_getaffinity(pid)) for pid in pids) == [len(os.sched_getaffinity(0)) // 2] * 2
        for _ in range(2):
            assert server.post("/v1/completions", BODY).json()["choices"] == expected["choices"]
        assert gauge(server.get("/metrics").text, "penstock_replica_requests_total") == 2
        os.kill(pids[0], signal.SIGKILL)
        assert server.post("/v1/completions", BODY).json()["choices"] == expected["choices"]


def test_replicas_to_zero_and_back(expected: dict[str, Any], tmp_path: Path) -> None:
    flags = ("--replicas", "0:2", "--sleep-after", "1", "--scale-down-after", "1", "--kv-cache-memory", "64MiB")
    with serving(tmp_path / "log", *flags) as server:
        assert server.post("/v1/completions", BODY).json()["choices"] == expected["choices"]
        wait_for(lambda: not children(server.process.pid), "the last engine to end")
        assert server.get("/readyz").json() == {"status": "asleep"}
        assert server.post("/v1/completions", BODY).json()["choices"] == expected["choices"], "it waits for an engine"
        assert gauge(server.get("/metrics").text, "penstock_fleet_replicas_wanted") >= 1
        assert "engines are wanted" in server.log.read_text() and "a request waits" in server.log.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engines", "nowhere"), "--engines: 'nowhere' is no address; write HOST:PORT"),
        (("--engines", "h:1", "--max-model-len", "512"), "is a setting of engines"),
        (("python-8m", "--engines", "h:1"), "is a setting of engines"),
        (("--engines", "h:1", "--fleet-ca", "/nowhere.pem"), "--fleet-ca /nowhere.pem cannot be used"),
        (("python-8m", "--replicas", "64"), "but this process may use"),
        (("python-8m", "--replicas", "2", "--api-processes", "2"), "does not go with --api-processes"),
    ],
)
def test_wrong_settings_are_one_line(flags: tuple[str, ...], message: str) -> None:
    done = penstock("serve", *flags, "--port", "0")
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr, done


def test_an_engine_that_others_can_reach_needs_a_key() -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PENSTOCK_FLEET_KEY"}
    command = [sys.executable, "-m", "penstock", "engine", "python-8m", "--listen", "0.0.0.0:0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "no key is required; set PENSTOCK_FLEET_KEY" in done.stderr
