"""Keys change without a restart: SIGHUP reads the file again, in every API process."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE, wait_for


def statuses(server: Server, key: str) -> set[int]:
    """The statuses of eight requests, each on a connection of its own."""
    headers = {"authorization": f"Bearer {key}"}
    return {httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE).status_code for _ in range(8)}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_key_is_exchanged_while_the_server_runs(tmp_path: Path, processes: int) -> None:
    file = tmp_path / "keys"
    file.write_text("alice old\n")
    flags = ("--api-key-file", str(file), "--api-processes", str(processes))
    with serving(tmp_path / "log", *flags) as server:
        assert statuses(server, "old") == {200} and statuses(server, "new") == {401}
        file.write_text("alice old\nalice new\n")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: statuses(server, "new") == {200}, "the new key")
        assert statuses(server, "old") == {200}
        file.write_text("alice new\n")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: statuses(server, "old") == {401}, "the old key to be refused")
        assert statuses(server, "new") == {200}
    log = (tmp_path / "log").read_text()
    assert "key=alice" in log and "Bearer" not in log
