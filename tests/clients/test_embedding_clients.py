"""Embeddings over HTTP against sentence-transformers, in an environment of its own.

python -m venv CLIENTS/python && CLIENTS/python/bin/pip install langchain-openai sentence-transformers
TEST_CLIENTS=CLIENTS pytest tests/clients
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.matrix import PROGRAMS
from tests.e2e.server import serving
from tests.encoders import minilm

PYTHON = Path(os.environ.get("TEST_CLIENTS", "/nowhere")) / "python" / "bin" / "python"


@pytest.mark.long
@pytest.mark.skipif(not PYTHON.exists(), reason="TEST_CLIENTS has no python/ with langchain-openai")
def test_embeddings_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    with serving(tmp_path / "log", model="all-minilm-l6-v2") as server:
        command = [
            str(PYTHON),
            str(PROGRAMS / "embedding_clients.py"),
            server.url + "/v1",
            "all-minilm-l6-v2",
            str(minilm()),
        ]
        done = subprocess.run(command, cwd=PROGRAMS, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
