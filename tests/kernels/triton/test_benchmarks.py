"""The GPU's benchmarks run, at tiny sizes, wherever the kernels do: they are not to break unseen."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.device import DEVICE

FOLDER = Path(__file__).parents[3] / "benchmarks"
TARGETS = {
    "llama_bf16": {"decode bf16 1x5/24": 0.75, "prefill bf16 20": 0.5, "saturated bf16 3x5/24": 0.65},
    "llama_fp8": {"decode fp8 1x5/24": 0.7, "prefill fp8 20": 0.5, "saturated fp8 3x5/24": 0.65},
    "qwen3": {},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/gpu.py, beside the modules that it imports."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu")


@pytest.mark.parametrize("group", TARGETS)
def test_models_behind_the_scheduler(group: str, gpu: Any) -> None:
    figures = [gpu.rounded(figure) for figure in getattr(gpu, group)(gpu.sizes(True), DEVICE)]
    assert json.loads(json.dumps(figures)) == figures
    assert {each["name"]: each["target"] for each in figures if "target" in each} == TARGETS[group]
    for each in figures:
        assert all(value > 0 for value in each.values() if isinstance(value, float)) or "host" in each["name"]


def test_every_op_is_measured(gpu: Any) -> None:
    figures = list(gpu.ops(gpu.sizes(True), DEVICE))
    found = {figure["op"].split()[0] for figure in figures[1:]}
    assert found == {"linear", "norm", "gate", "store", "attention", "sample", "experts"}
    assert all(figure["us"] > 0 for figure in figures[1:])


def test_groups_are_processes_whose_failure_is_told(gpu: Any, tmp_path: Path) -> None:
    assert gpu.measure_group("qwen3", "cpu", True, 0.01) == ([], "stopped after 0 s")
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        str(FOLDER / "gpu.py"),
        "--tiny",
        "--device",
        "cpu",
        "--only",
        "ready",
        "--json",
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    said = json.loads(out.read_text())
    assert said["failures"] == {} and said["commit"] and said["hardware"] and said["roofline"]["bandwidth_tb_s"] == 4.3
    assert [(each["name"], each["target_s"]) for each in said["figures"]] == [("ready", 25)]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="would run these very tests")
def test_the_check_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    command = [str(FOLDER.parent / "scripts" / "gpu_check.sh"), str(tmp_path / "gpu.json")]
    environment = {**os.environ, "PYTHON": sys.executable, "WHEELS": ""}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 2 and "no GPU that this torch can use" in said.stderr
    assert not list(tmp_path.iterdir())
