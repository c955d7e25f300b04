"""A batch on a server that is killed: each request is answered once, and batches that were open go on."""

import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE, wait_for

FLAGS = ("--max-num-seqs", "4", "--kv-cache-memory", "32MiB")


def begin(server: Server, name: str, lines: int) -> str:
    """Creates a batch of requests for 24 tokens each. Returns its id."""
    body = {"prompt": "def f(", "max_tokens": 24, "ignore_eos": True}
    rows = [{"custom_id": f"{name}-{i}", "url": "/v1/completions", "body": body} for i in range(lines)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    form: Any = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
    file = httpx.post(f"{server.url}/v1/files", **form, timeout=PATIENCE).raise_for_status().json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(server.post("/v1/batches", wanted).raise_for_status().json()["id"])


def answered(server: Server, batch_id: str) -> int:
    """How many answers a batch has."""
    return int(server.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"])


def custom_ids(server: Server, batch_id: str) -> list[str]:
    """Those of the output, when the batch is complete."""
    wait_for(lambda: server.get(f"/v1/batches/{batch_id}").json()["status"] == "completed", "the batch to end")
    batch = server.get(f"/v1/batches/{batch_id}").json()
    text = server.get(f"/v1/files/{batch['output_file_id']}/content").text
    assert batch["error_file_id"] is None
    return sorted(json.loads(line)["custom_id"] for line in text.splitlines())


@pytest.mark.parametrize(("kills", "lines"), [(1, 40), pytest.param(10, 1000, marks=pytest.mark.rare)])
def test_each_request_is_answered_once_however_often_the_server_is_killed(
    tmp_path: Path, kills: int, lines: int
) -> None:
    source = random.Random(kills)
    flags = (*FLAGS, "--state-dir", str(tmp_path / "state"))
    long = short = ""
    for point in sorted(source.sample(range(2, lines // 2), kills)):
        with serving(tmp_path / "log", *flags) as server:
            long = long or begin(server, "long", lines)
            short = short or begin(server, "short", 3)
            wait_for(lambda: answered(server, long) >= point, f"{point} answers")  # noqa: B023
            time.sleep(source.uniform(0, 0.05))
            server.process.kill()
            server.process.wait()
    with serving(tmp_path / "log", *flags) as server:
        assert custom_ids(server, short) == sorted(f"short-{i}" for i in range(3))
        assert custom_ids(server, long) == sorted(f"long-{i}" for i in range(lines))
