"""Clients with many dependencies, in environments of their own.

python -m venv CLIENTS/python && CLIENTS/python/bin/pip install langchain-openai instructor sentence-transformers
python -m venv CLIENTS/wires
CLIENTS/wires/bin/pip install "tritonclient[all]" grpcio-health-checking
CLIENTS/wires/bin/pip install langchain-anthropic langchain-ollama litellm mcp
cd CLIENTS/node && npm install ai@6 @ai-sdk/openai-compatible zod
TEST_CLIENTS=CLIENTS pytest tests/clients
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving
from tests.encoders import minilm

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("TEST_CLIENTS", "/nowhere"))
WIRES = CLIENTS / "wires" / "bin" / "python"
PYTHON, NODE = CLIENTS / "python" / "bin" / "python", CLIENTS / "node"
pytestmark = pytest.mark.long


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.mark.skipif(not PYTHON.exists(), reason="TEST_CLIENTS has no python/ with langchain-openai and instructor")
def test_langchain_and_instructor(server: Server) -> None:
    run([str(PYTHON), str(HERE / "python_clients.py"), server.url + "/v1", "smollm2"], HERE)


@pytest.mark.skipif(not WIRES.exists(), reason="TEST_CLIENTS has no wires/ with langchain-ollama, litellm and others")
def test_clients_of_other_wires(server: Server) -> None:
    run([str(WIRES), str(HERE / "wire_clients.py"), server.url, "smollm2"], HERE)


@pytest.mark.skipif(not PYTHON.exists(), reason="TEST_CLIENTS has no python/ with langchain-openai")
def test_embeddings_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    with serving(tmp_path / "log", model="all-minilm-l6-v2") as server:
        command = [str(PYTHON), str(HERE / "embedding_clients.py"), server.url + "/v1", "all-minilm-l6-v2"]
        run([*command, str(minilm())], HERE)


@pytest.mark.skipif(
    not (NODE / "node_modules" / "ai").exists() or shutil.which("node") is None,
    reason="TEST_CLIENTS has no node/ with ai@6, @ai-sdk/openai-compatible and zod, or node is missing",
)
def test_the_vercel_ai_sdk(server: Server) -> None:
    run(["node", str(HERE / "ai_sdk.mjs"), server.url + "/v1", "smollm2"], NODE)
