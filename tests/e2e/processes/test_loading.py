"""The port is open while the model is loaded."""

import contextlib
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.weights.packaged import EMBEDDED
from tests.e2e.bound import bound
from tests.e2e.certificates import Authority
from tests.e2e.server import status
from tests.engine.processes import children, command_line
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port


@pytest.mark.parametrize("kind", ["one process", "several processes", "TLS"])
def test_it_is_alive_and_not_ready_until_the_engine_is(tmp_path: Path, kind: str) -> None:
    port, flags = free_port(), []
    url, context = f"http://127.0.0.1:{port}", None
    if kind == "several processes":
        flags = ["--api-processes", "2"]
    if kind == "TLS":
        authority = Authority(tmp_path)
        (tmp_path / "both.pem").write_bytes(b"".join(authority.sign(1)))
        flags = ["--tls-certificate", str(tmp_path / "both.pem")]
        url, context = f"https://127.0.0.1:{port}", authority.context
    with serving(tmp_path, port, *flags) as server:
        with stopped(wait_for(lambda: started_by(server), "the engine's process")):  # a model that takes long
            wait_for(lambda: status(url + "/livez", context) == 200, "the port to be open", PATIENCE / 2)
            check_answers(url, context)
        wait_for(lambda: status(url + "/readyz", context) == 200, "the server to be ready")
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, verify=context or False, timeout=PATIENCE
        )
        assert answer.status_code == 200


def test_no_process_is_ready_before_all_are(tmp_path: Path) -> None:
    """They share the port: one that still loads would refuse what another one has asked for."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(tmp_path, port, "--api-processes", "2") as server, contextlib.ExitStack() as late:
        with stopped(wait_for(lambda: started_by(server), "the engine's process")):
            wait_for(lambda: len(api_processes(server)) == 2, "two API processes")
            late.enter_context(stopped(api_processes(server)[1]))
        wait_for(lambda: status(url + "/v1/models", timeout=0.5) == 200, "the other process to answer")
        assert wait_for(lambda: status(url + "/readyz", timeout=0.5), "its word") == 503
        late.close()
        wait_for(lambda: status(url + "/readyz") == 200, "both to be ready")
        assert all(status(url + "/v1/models") == 200 for _ in range(50))


@contextlib.contextmanager
def serving(folder: Path, port: int, *flags: str) -> Iterator[int]:
    """A server that has just been started: the id of its process."""
    command = [sys.executable, "-m", "penstock", "serve", EMBEDDED, "--port", str(port), "--threads", "1", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder)}
    process = subprocess.Popen(bound(command), env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def api_processes(pid: int) -> list[int]:
    return [child for child in children(pid) if "api_process" in command_line(child)]


def started_by(pid: int) -> int | None:
    """The first child of a process that has begun its own program. Until then its parent is blocked by vfork."""
    ours = command_line(pid)
    return next((child for child in children(pid) if command_line(child) not in ("", ours)), None)


def check_answers(url: str, context: ssl.SSLContext | None) -> None:
    with httpx.Client(verify=context or False, timeout=PATIENCE) as client:
        for path in ("/readyz", "/health", "/ping", "/v2/health/ready"):
            answer = client.get(url + path)
            assert (answer.status_code, answer.json()) == (503, {"status": "the model is loaded"})
        answer = client.post(f"{url}/v1/chat/completions", json={"messages": [], "more": "x" * 500_000})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "model_loading"
        assert client.head(f"{url}/livez").status_code == 200
