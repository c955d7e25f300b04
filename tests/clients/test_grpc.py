"""KServe's gRPC service with SmolLM2 and unmodified tritonclient and grpcio-health-checking.

They are in the environment of tritonclient that matrix.py makes.
"""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.matrix import CLIENTS, PROGRAMS
from tests.clients.test_matrix import FOLDER
from tests.e2e.server import PATIENCE, Server, free_port, gauge, serving, wait_for
from tests.smollm2 import smollm2

pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")
_TRITON = next(client for client in CLIENTS if client.package == "tritonclient")
PYTHON = FOLDER / _TRITON.folder / "bin" / "python"
pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"TEST_CLIENTS has no {_TRITON.folder}"),
]
FLAGS = ("--max-num-seqs", "8", "--kv-cache-memory", "256MiB", "--served-model-name", "smollm2")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def served(port: int, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    more = getattr(request, "param", ())
    with serving(tmp_path / "log", *FLAGS, "--grpc-port", str(port), *more, model=str(smollm2())) as server:
        yield server


def client(port: int, shows: str) -> subprocess.Popen[str]:
    command = [str(PYTHON), str(PROGRAMS / "grpc_clients.py"), f"127.0.0.1:{port}", "smollm2", shows]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ends(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-6000:]


def test_tritonclient(served: Server, port: int) -> None:
    ends(client(port, "all"))
    running = "penstock_num_requests_running"
    wait_for(
        lambda: gauge(served.get("/metrics").text, running) == 0, PATIENCE, "what was cancelled to end in the engine"
    )


@pytest.mark.parametrize("served", [("--api-key", "secret")], indirect=True)
def test_keys(served: Server, port: int) -> None:
    ends(client(port, "key"))


def test_a_stop(served: Server, port: int) -> None:
    process = client(port, "drain")
    assert process.stdout is not None and process.stdout.readline() == "stop\n"
    served.process.send_signal(signal.SIGTERM)
    ends(process)
    assert served.process.wait(30) == 0
