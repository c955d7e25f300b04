"""A server's log as JSON: every line of every process is one object, and none has what users wrote."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE, wait_for

SECRET = "words of the user"
FIELDS = ("ts", "level", "process", "logger", "message")  # in this order


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of a server whose engine has been killed once."""
    log: Path = tmp_path_factory.mktemp("json") / "log"
    with serving(log, "--log-format", "json", "--kv-cache-memory", "64MiB", "--max-num-seqs", "8") as server:
        ask(server, "first")
        headers = {"x-request-id": "second"}
        refused = httpx.post(f"{server.url}/v1/{SECRET}", json={"prompt": SECRET}, headers=headers, timeout=PATIENCE)
        assert refused.status_code == 404
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_for(lambda: server.get("/readyz").status_code == 200 and "the engine is back" in log.read_text(), "it")
        ask(server, "third")
    return [json.loads(line) for line in log.read_text().splitlines()]


def ask(server: Server, name: str) -> None:
    body = {"prompt": f"# {SECRET}\ndef f", "max_tokens": 3}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers={"x-request-id": name}, timeout=60)
    assert answer.status_code == 200 and answer.headers["x-request-id"] == name


def test_every_line_is_an_object_with_the_same_first_fields(logged: list[dict[str, Any]]) -> None:
    for line in logged:
        assert tuple(line)[: len(FIELDS)] == FIELDS, line
        assert line["ts"].endswith("+00:00") and line["level"] in ("debug", "info", "warning", "error")
    assert {line["process"] for line in logged} == {"api", "engine"}
    messages = [line["message"] for line in logged]
    assert any(message.startswith("serving python-8m on") for message in messages)
    assert sum("read 16 MiB of weights" in message for message in messages) == 2
    memory = next(line for line in logged if line["message"] == "memory")
    assert memory["bytes"]["KV cache"] == pytest.approx(64 << 20, rel=0.05)


def test_requests_have_their_ids(logged: list[dict[str, Any]]) -> None:
    requests = [line for line in logged if line["message"] == "request" and line["path"].startswith("/v1")]
    assert [(line["request_id"], line["status"]) for line in requests] == [
        ("first", 200),
        ("second", 404),
        ("third", 200),
    ]
    assert [len(line.get("answer_id", "")) for line in requests] == [24, 0, 24]


def test_no_line_has_a_users_words(logged: list[dict[str, Any]]) -> None:
    text = json.dumps([line for line in logged if "path" not in line])
    assert SECRET not in text and SECRET.split()[-1] not in text
