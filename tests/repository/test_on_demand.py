"""Language models that come and go: one server, room for one engine, two models."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import Server, serving
from tests.engine.processes import children
from tests.patience import PATIENCE, wait_for

SETTINGS = "model: python-8m\nsettings: {max-num-seqs: 4, kv-cache-memory: 32MiB, max-model-len: 128}\n"
STAY = 1.5


def complete(server: Server, model: str | None, headers: dict[str, str] | None = None) -> httpx.Response:
    body: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    if model is not None:
        body["model"] = model
    return httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=PATIENCE)


def run(server: Server, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *command], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stdout


def test_two_models_share_room_for_one_engine(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for name in ("first", "second"):
        (root / name).mkdir(parents=True)
        (root / name / "model.yaml").write_text(SETTINGS)
    flags = ("--repository", str(root), "--max-loaded", "1", "--min-stay", str(STAY), "--state-dir", "none")
    with serving(tmp_path / "log", *flags, model=None) as server:
        assert not children(server.process.pid)
        assert {each["id"] for each in server.get("/v1/models").json()["data"]} == {"first", "second"}
        assert server.get("/v1/models/second").json()["id"] == "second"
        assert server.get("/api/ps").json() == {"models": []}
        assert complete(server, "third").status_code == 404

        answer = complete(server, None)  # the first one, which this loads
        assert answer.status_code == 200 and answer.json()["model"] == "first"
        text = answer.json()["choices"][0]["text"]
        refused = complete(server, "second", {"X-Request-Timeout": "0.05"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_room"
        assert (
            1 <= int(refused.headers["Retry-After"]) <= STAY + 1
            and "--max-loaded" in refused.json()["error"]["message"]
        )

        answer = complete(server, "second")  # waits until the first one has stayed long enough
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == text
        assert len(children(server.process.pid)) == 1
        shown = run(server, "ps", server.url)
        assert "second" in shown and "first" not in shown and "never" in shown
        assert {each["id"] for each in server.get("/v1/models").json()["data"]} == {"first", "second"}

        run(server, "stop", "second", "--url", server.url)
        wait_for(lambda: not children(server.process.pid), "the engine to end")
        assert server.get("/api/ps").json() == {"models": []}
