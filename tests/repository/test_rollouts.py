"""Rollouts of a real server: `penstock rollout`, its routes, and what requests get meanwhile."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE, wait_for
from tests.repository import onnx_files as files
from tests.repository.onnx_files import put

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")

FIRST = "versions: [1]"
QUICK = {"hold": 0.1, "tolerances": {"errors": 0.05, "disagreement": 0.3}}


class _Site:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = httpx.Client(base_url=server.url, timeout=PATIENCE)

    def infer(self, model: str, session: str = "", **fields: Any) -> dict[str, Any]:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}], **fields}
        headers = {"x-session-id": session} if session else {}
        answer = self.client.post(f"/v2/models/{model}/infer", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def state(self, name: str) -> dict[str, Any]:
        rows = self.server.get("/v2/repository/rollouts").json()["rollouts"]
        found: dict[str, Any] = next(row for row in rows if row["name"] == name)
        return found

    def versions(self, name: str) -> list[str]:
        rows = self.server.post("/v2/repository/index", {"ready": True}).json()
        return sorted(row["version"] for row in rows if row["name"] == name)

    def change(self, name: str, action: str, **fields: Any) -> str:
        """Returns the error; "" for success."""
        answer = self.server.post(f"/v2/repository/models/{name}/rollout", {"action": action, **fields})
        return "" if answer.status_code == 200 else answer.json()["error"]

    def wait(self, name: str, versions: list[str]) -> None:
        wait_for(lambda: self.versions(name) == versions, f"{name} has the versions {versions}")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        made = [sys.executable, "-m", "penstock", "rollout", *arguments, "--url", self.server.url]
        return subprocess.run(made, capture_output=True, text=True, timeout=PATIENCE)

    def use(self, name: str, until: str) -> None:
        """Sends requests until the rollout has this status."""
        end = time.monotonic() + PATIENCE
        while self.state(name)["status"] != until:
            assert time.monotonic() < end, self.state(name)
            for _ in range(20):
                self.infer(name)


@contextmanager
def _serving(folder: Path, root: Path) -> Iterator[_Site]:
    with serving(folder / "log", "--repository", str(root), "--state-dir", "none", model=None) as server:
        yield _Site(server)


# Finds the candidate worse by 1 where its outputs differ, and says nothing of the first pair.
OWN_JUDGE = """
import json, sys
print("null", flush=True)
sys.stdin.readline()
for line in sys.stdin:
    pair = json.loads(line)
    assert pair["request"] == {"x": [[1, 2, 3, 4]]} and not pair["candidate"]["failed"]
    print(float(pair["candidate"]["outputs"] != pair["incumbent"]["outputs"]), flush=True)
"""


def test_versions_take_over_as_far_as_their_answers_hold_up(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for name, factor in (("good", 2.0), ("garbage", -2.0), ("judged", 2.0), ("own", 2.001)):
        put(root, name, files.scale(2), settings=FIRST)
        put(root, name, files.scale(factor), 2)
    (root / "own" / "judge.py").write_text(OWN_JUDGE)
    (root / "own" / "model.yaml").write_text(f"{FIRST}\njudge: [{sys.executable}, judge.py]\n")
    with _serving(tmp_path, root) as site:
        assert site.infer("good")["model_version"] == "1"
        assert "candidate is missing" in site.change("good", "start")
        assert "version 1 of 'good' serves already" in site.change("good", "start", candidate=1)
        assert "version 7 of 'good' is not in its folder" in site.change("good", "start", candidate=7)
        assert "there is no judge 'taste'" in site.change("good", "start", candidate=2, tolerances={"taste": 0.1})
        assert site.versions("good") == ["1"]

        assert not site.change("good", "start", candidate=2, plan=[0, 50, 100], **QUICK)
        assert "abort it first" in site.change("good", "start", candidate=2)
        with ThreadPoolExecutor(4) as pool:  # no request fails while versions change
            answers = list(pool.map(lambda _: site.infer("good"), range(200)))
        assert all(answer["outputs"][0]["data"] == [2, 4, 6, 8] for answer in answers)
        site.use("good", "promoted")
        site.wait("good", ["2"])
        assert site.infer("good")["model_version"] == "2"

        assert not site.change("garbage", "start", candidate=2, **QUICK)
        site.use("garbage", "rolled back")
        assert site.infer("garbage")["outputs"][0]["data"] == [2, 4, 6, 8]
        site.wait("garbage", ["1"])
        reason = site.state("garbage")["reason"]
        assert reason.startswith("disagreement: worse by ") and site.state("garbage")["share"] == 0
        shown = site.command().stdout
        assert "rolled back" in shown and "promoted" in shown and reason[:30] in shown
        metrics = site.server.get("/metrics").text
        assert 'penstock_rollout_worse{bound="low",judge="disagreement",model="garbage",version="2"}' in metrics

        # Other judges find next to no difference.
        assert not site.change("own", "start", candidate=2, hold=0.1)
        assert [judge["name"] for judge in site.state("own")["judges"]][-1] == "own"
        site.use("own", "rolled back")
        assert site.state("own")["reason"].startswith("own: worse by ")

        # Labels: what has turned out to be right for a request.
        ranked = {"plan": [0, 100], "hold": 0, "tolerances": {"ndcg": 0.2}}
        assert not site.change("judged", "start", candidate=2, **ranked)
        feedback = {"model": "judged", "request_id": "a0", "label": [0, 0, 1, 2]}
        assert site.server.post("/feedback", feedback).json() == {"used": False}
        end = time.monotonic() + PATIENCE
        sent = 0
        while site.state("judged")["status"] != "promoted":
            assert time.monotonic() < end
            site.infer("judged", id=f"a{sent}")
            answer = site.server.post("/feedback", feedback | {"request_id": f"a{sent}"})
            sent += 1
        assert answer.status_code == 200
        wrong = site.server.post("/feedback", {"model": "judged", "request_id": "a", "label": "good"})
        assert wrong.status_code == 400
    with _serving(tmp_path, root) as site:  # what was decided holds after a restart
        assert (site.versions("good"), site.versions("garbage"), site.versions("judged")) == (["2"], ["1"], ["2"])
        put(root, "garbage", files.scale(3), 3, settings="versions: latest")
        assert site.server.post("/v2/repository/models/garbage/load", {}).status_code == 200
        site.wait("garbage", ["3"])


def test_a_rollout_goes_on_after_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, "doubled", files.scale(2), settings=FIRST)
    put(root, "doubled", files.scale(2), 2)
    with _serving(tmp_path, root) as site:
        started = site.command("start", "doubled", "--candidate", "2", "--plan", "50,100", "--hold", "3600")
        assert started.returncode == 0, started.stderr
        first = {session: site.infer("doubled", session)["model_version"] for session in map(str, range(40))}
        assert 5 < list(first.values()).count("2") < 35
        assert first == {session: site.infer("doubled", session)["model_version"] for session in first}
        wait_for(lambda: site.state("doubled")["judges"][0]["requests"] > 20, "copies have been compared")
        assert not site.change("doubled", "pause")
        before = site.state("doubled")
    with _serving(tmp_path, root) as site:
        after = site.state("doubled")
        assert after["status"] == "paused" and after["judges"][0]["requests"] >= before["judges"][0]["requests"]
        assert first == {session: site.infer("doubled", session)["model_version"] for session in first}
        assert not site.change("doubled", "resume")
        assert site.command("abort", "doubled").stdout == (
            "the rollout of doubled was aborted; penstock rollout shows where it stands\n"
        )
        site.wait("doubled", ["1"])
        assert site.infer("doubled")["model_version"] == "1"
        assert "has no rollout that runs" in site.change("doubled", "abort")
