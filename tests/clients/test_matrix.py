"""The clients of docs/clients.md, in the environments that `python -m tests.clients.matrix FOLDER` makes.

TEST_CLIENTS=FOLDER pytest tests/clients/test_matrix.py
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.matrix import CLIENTS, Client, table
from tests.e2e.server import Server

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("TEST_CLIENTS", "/nowhere")).absolute()


def test_the_docs_have_the_clients_that_are_run() -> None:
    assert f"\n{table()}\n" in (HERE.parents[1] / "docs" / "clients.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.folder)
def test_a_client_works_unmodified(server: Server, client: Client) -> None:
    folder = FOLDER / client.folder
    if not folder.exists():
        pytest.skip(f"TEST_CLIENTS has no {client.folder}; python -m tests.clients.matrix FOLDER makes it")
    command = [*client.command(FOLDER), server.url, "smollm2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
