"""`penstock serve --repository --api-processes 2`: every process has models of every kind, whichever gets a request.

Tests of one process run here again, with two.
"""

import base64
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes.test_api_processes import api_pids, metric
from tests.e2e.server import Server, serving
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port
from tests.repository import onnx_files as files
from tests.repository import test_language_models as one_process
from tests.repository import test_text_rollouts as rollouts
from tests.repository.onnx_files import put
from tests.repository.served import tensor
from tests.repository.test_language_models import (  # noqa: F401
    complete,
    embed,
    root,
    test_a_pipeline_of_a_language_model_and_of_an_embedder,
    test_a_pipeline_streams_over_grpc,
    test_a_pipeline_streams_the_text_of_a_language_model,
    test_a_setting_of_the_server_is_refused_by_name,
)

SMALL = one_process.SMALL
ROW = tensor("x", [1, 2, 3, 4], [1, 4])


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(root: Path, grpc_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--repository", str(root), "--grpc-port", str(grpc_port), "--state-dir", "none", "--api-processes", "2")
    with serving(log, *flags, model=None) as running:
        wait_for(lambda: "ready after" in log.read_text(), "both processes to answer")
        yield running


def infer(server: Server, model: str = "doubled", version: str = "") -> httpx.Response:
    path = f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"
    return server.post(path, {"inputs": [ROW]})


def through_both(server: Server) -> int:
    """Requests of each kind, each over a connection of its own, until both processes have answered some."""
    for number in range(1, 100):
        assert complete(server).json()["usage"]["completion_tokens"] == 4
        assert len(embed(server).json()["data"][0]["embedding"]) == 384
        assert infer(server).json()["outputs"][0]["data"] == [2, 4, 6, 8]
        log = server.log.read_text()
        if number >= 8 and "api-0: request" in log and "api-1: request" in log:
            return number
    raise AssertionError("one process got all connections")


def test_every_process_has_every_kind_and_counts_are_one_sum(server: Server) -> None:
    name = 'generation_tokens_total{model_name="writer"}'
    before = metric(server, name)
    many = through_both(server)
    assert metric(server, name) == before + 4 * many
    stats = server.get("/v2/models/doubled/stats").json()["model_stats"][0]
    assert stats["inference_stats"]["success"]["count"] >= many


def test_what_is_loaded_and_unloaded_in_one_process_is_so_in_all(server: Server, root: Path) -> None:  # noqa: F811
    put(root, "late", files.scale(3))
    (root / "reader").mkdir()
    (root / "reader" / "model.yaml").write_text(f"model: python-8m\n{SMALL}")
    for _ in range(3):
        for model in ("late", "reader"):
            assert server.post(f"/v2/repository/models/{model}/load", {}).status_code == 200
        for _ in range(8):
            assert infer(server, "late").json()["outputs"][0]["data"] == [3, 6, 9, 12]
            assert complete(server, "reader").status_code == 200
            assert "reader" in [each["id"] for each in server.get("/v1/models").json()["data"]]
        for model in ("late", "reader"):
            assert server.post(f"/v2/repository/models/{model}/unload", {}).status_code == 200
        for _ in range(8):
            assert infer(server, "late").status_code == 404
            assert complete(server, "reader").status_code == 404
    failed = server.post("/v2/repository/models/wrong/load", {})
    assert failed.status_code == 400 and "port" in failed.text


def test_overrides_and_versions_hold_in_all_processes(server: Server, root: Path) -> None:  # noqa: F811
    put(root, "both", files.scale(2), settings="versions: [1, 2]\nlabels: {old: 1}\n")
    put(root, "both", files.scale(5), version=2)
    assert server.post("/v2/repository/models/both/load", {}).status_code == 200
    for _ in range(8):
        for version, factor in (("", 5), ("2", 5), ("1", 2), ("old", 2)):
            assert infer(server, "both", version).json()["outputs"][0]["data"] == [factor * x for x in (1, 2, 3, 4)]
        assert "the versions are 1, 2" in infer(server, "both", "7").text
    override = {"config": "{}", "file:1/model.onnx": base64.b64encode(files.scale(7)).decode()}
    assert server.post("/v2/repository/models/both/load", {"parameters": override}).status_code == 200
    for _ in range(8):
        assert infer(server, "both").json()["outputs"][0]["data"] == [7, 14, 21, 28]
        assert infer(server, "both", "2").status_code == 404


def test_a_killed_process_ends_its_requests_and_another_has_all_models(server: Server) -> None:
    pids = api_pids(server)
    body = {"model": "writer", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=PATIENCE) as client, client.stream("POST", server.url + "/v1/completions", json=body):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(set(api_pids(server)) - set(pids)) == 2, "other processes")
    assert through_both(server)
    assert server.post("/v2/repository/models/writer/unload", {}).status_code == 200, "no request is counted for ever"
    assert server.post("/v2/repository/models/writer/load", {}).status_code == 200


def test_a_model_on_the_command_line_is_beside_them(root: Path, tmp_path: Path) -> None:  # noqa: F811
    flags = ("--repository", str(root), "--load-model", "doubled", "--load-model", "embedder", "--state-dir", "none")
    flags += ("--api-processes", "2", "--served-model-name", "main", "--kv-cache-memory", "32MiB")
    with serving(tmp_path / "log", *flags) as server:
        wait_for(lambda: "ready after" in server.log.read_text(), "both processes to answer")
        for _ in range(12):
            assert complete(server, "main").json()["model"] == complete(server, None).json()["model"] == "main"
            assert len(embed(server).json()["data"][0]["embedding"]) == 384
            assert infer(server).json()["outputs"][0]["data"] == [2, 4, 6, 8]
        assert metric(server, 'generation_tokens_total{model_name="main"}') == 96


def runs_only(server: Server, name: str) -> bool:
    """Whether both processes, or the one that answers thrice, see the engine of this model and no other one."""
    found = [server.get("/api/ps").json()["models"] for _ in range(3)]
    return all([each["name"].partition(":")[0] for each in models] == [name] for models in found)


def test_models_on_demand_share_room_for_one_engine(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("first", "second"):
        (models / name).mkdir(parents=True)
        (models / name / "model.yaml").write_text(f"model: python-8m\n{SMALL}")
    flags = ("--repository", str(models), "--max-loaded", "1", "--min-stay", "0.5", "--state-dir", "none")
    with serving(tmp_path / "log", *flags, "--api-processes", "2", model=None) as server:
        wait_for(lambda: "ready after" in server.log.read_text(), "both processes to answer")
        for name in ("first", "second", "first", "second", "second", "first"):
            assert complete(server, name).json()["model"] == name
            wait_for(partial(runs_only, server, name), f"{name} to be the only one")
        body = {"model": "second", "prompt": "x", "max_tokens": 4}
        headers = {"X-Request-Timeout": "0.05"}
        refused = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=PATIENCE)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_room"
        listed = server.get("/v1/models").json()["data"]
        assert {each["id"] for each in listed} == {"first", "second"}


def test_a_rollout_decides_for_all_processes(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / "writer").mkdir(parents=True)
    (models / "writer" / "model.yaml").write_text(rollouts.SETTINGS)
    for number in (1, 3):
        rollouts.put_version(models / "writer", number)
    flags = ("--repository", str(models), "--state-dir", "none", "--api-processes", "2")
    with serving(tmp_path / "log", *flags, model=None) as server:
        wait_for(lambda: "ready after" in server.log.read_text(), "both processes to answer")
        rules = {"action": "start", "candidate": 3, "plan": [50, 100], **rollouts.WIDE, "patience": 600, "hold": 600}
        assert server.post("/v2/repository/models/writer/rollout", rules).status_code == 200
        versions: dict[int, set[str]] = {}  # by session
        for session in [*range(24), *range(24)]:
            body = {"model": "writer", "prompt": rollouts.PROMPTS[session], "max_tokens": 4}
            headers = {"x-session-id": str(session)}
            made = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=PATIENCE)
            versions.setdefault(session, set()).add(made.json()["system_fingerprint"])
        assert {len(each) for each in versions.values()} == {1}, (
            "a session stays on a version, whichever process it gets"
        )
        assert len(set.union(*versions.values())) == 2
        log = server.log.read_text()
        assert "api-0: request" in log and "api-1: request" in log

        def compared() -> bool:
            (row,) = server.get("/v2/repository/rollouts").json()["rollouts"]
            assert row["candidate"] == "3" and row["status"] == "running"
            return min(judge["requests"] for judge in row["judges"]) >= 8

        wait_for(compared, "copies of requests to be compared")
