"""KServe's gRPC service with SmolLM2 and unmodified tritonclient and grpcio-health-checking.

They are in the environments of tritonclient that `python -m tests.clients install FOLDER tritonclient` makes.
"""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import behind
from tests.clients.matrix import CLIENTS, PROGRAMS, Client
from tests.e2e.server import Server, gauge, serving
from tests.patience import wait_for
from tests.ports import free_port
from tests.smollm2 import smollm2

pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")
pytestmark = pytest.mark.rare
FLAGS = ("--max-num-seqs", "8", "--kv-cache-memory", "256MiB", "--served-model-name", "smollm2")


@pytest.fixture(params=[client for client in CLIENTS if client.tests == "test_grpc.py"], ids=lambda client: client.name)
def triton(request: pytest.FixtureRequest) -> Client:
    client: Client = request.param
    if not client.is_installed():
        pytest.skip(f"TEST_CLIENTS has no {client.name}")
    return client


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def served(port: int, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    more, own = getattr(request, "param", ()), ("--grpc-port", str(port))
    if more != "gateway":
        with serving(tmp_path / "log", *FLAGS, *own, *more, model=str(smollm2())) as server:
            yield server
        return
    with (
        serving(tmp_path / "engine", *FLAGS, model=str(smollm2())) as engine,
        serving(tmp_path / "log", *behind(engine, tmp_path), *own, model=None) as server,
    ):
        yield server


def client(triton: Client, port: int, shows: str) -> subprocess.Popen[str]:
    command = [str(triton.runtime()), str(PROGRAMS / "grpc_clients.py"), f"127.0.0.1:{port}", "smollm2", shows]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ends(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-6000:]


@pytest.mark.parametrize("served", [(), "gateway"], ids=["server", "gateway"], indirect=True)
def test_tritonclient(triton: Client, served: Server, port: int) -> None:
    ends(client(triton, port, "all"))
    running = "penstock_num_requests_running"
    wait_for(lambda: gauge(served.get("/metrics").text, running) == 0, "what was cancelled to end in the engine")


@pytest.mark.parametrize("served", [("--api-key", "secret")], indirect=True)
def test_keys(triton: Client, served: Server, port: int) -> None:
    ends(client(triton, port, "key"))


def test_a_stop(triton: Client, served: Server, port: int) -> None:
    process = client(triton, port, "drain")
    assert process.stdout is not None and process.stdout.readline() == "stop\n"
    served.process.send_signal(signal.SIGTERM)
    ends(process)
    assert served.process.wait(30) == 0
