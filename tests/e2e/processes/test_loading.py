"""The port is open while the model is loaded."""

import os
import signal
import ssl
import subprocess
import sys
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
    command = [sys.executable, "-m", "penstock", "serve", EMBEDDED, "--port", str(port), "--threads", "1", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(bound(command), env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        engine = wait_for(lambda: started_by(process.pid), "the engine's process")
        os.kill(engine, signal.SIGSTOP)  # a model that takes long
        try:
            wait_for(lambda: status(url + "/livez", context) == 200, "the port to be open", PATIENCE / 2)
            check_answers(url, context)
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_for(lambda: status(url + "/readyz", context) == 200, "the server to be ready")
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, verify=context or False, timeout=PATIENCE
        )
        assert answer.status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_no_process_is_ready_before_all_are(tmp_path: Path) -> None:
    """They share the port: one that still loads would refuse what another one has asked for."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "penstock", "serve", EMBEDDED, "--port", str(port), "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(
        bound([*command, "--api-processes", "2"]), env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        engine = wait_for(lambda: started_by(process.pid), "the engine's process")
        os.kill(engine, signal.SIGSTOP)
        wait_for(lambda: len(api_processes(process.pid)) == 2, "two API processes")
        late = api_processes(process.pid)[1]
        os.kill(late, signal.SIGSTOP)
        os.kill(engine, signal.SIGCONT)
        wait_for(lambda: soon(url + "/v1/models") == 200, "the other process to answer")
        assert wait_for(lambda: soon(url + "/readyz"), "its word") == 503
        os.kill(late, signal.SIGCONT)
        wait_for(lambda: status(url + "/readyz") == 200, "both to be ready")
        assert all(status(url + "/v1/models") == 200 for _ in range(50))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def soon(url: str) -> int:
    """The status of a GET; 0 if the process that gets the connection is stopped."""
    try:
        return httpx.get(url, timeout=0.5).status_code
    except httpx.TransportError:
        return 0


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
