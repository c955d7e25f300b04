"""The one-shot models of a repository with unmodified tritonclient.

It is in the environments that `python -m tests.clients install FOLDER tritonclient` makes.
"""

import subprocess
from pathlib import Path

import pytest

from tests.clients.matrix import CLIENTS, PROGRAMS, Client
from tests.e2e.server import serving
from tests.ports import free_port
from tests.repository import onnx_files as files
from tests.repository.onnx_files import put

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")
pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")
pytestmark = pytest.mark.rare
PBTXT = """#pb
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 1000 }
"""


@pytest.mark.parametrize(
    "client", [client for client in CLIENTS if client.tests == "test_grpc.py"], ids=lambda client: client.name
)
def test_tritonclient(client: Client, tmp_path: Path) -> None:
    if not client.is_installed():
        pytest.skip(f"TEST_CLIENTS has no {client.name}")
    root, port = tmp_path / "models", free_port()
    put(root, "addsub", files.add_sub(), settings=PBTXT)
    put(root, "doubled", files.scale(2))
    put(root, "texts", files.identity(files.STRING, ("n",)))
    flags = ("--repository", str(root), "--grpc-port", str(port), "--state-dir", "none")
    with serving(tmp_path / "log", *flags, model=None) as server:
        command = [str(client.runtime()), str(PROGRAMS / "triton_repository.py"), server.url[7:], f"127.0.0.1:{port}"]
        made = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, (made.stdout + made.stderr)[-6000:]
