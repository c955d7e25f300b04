"""Quantising from the command line: what it would take, what it gives, and what it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from penstock.weights.packaged import embedded_model
from tests.cli.conftest import RunCommand
from tests.cli.test_help import penstock

SMALL = ("--kv-cache-memory", "64MiB", "--max-model-len", "512")


def planned(run_command: RunCommand, path: Path, *flags: str) -> tuple[int, dict[str, dict[str, object]]]:
    """The bytes of the embedded model's weights, and the settings."""
    done = run_command("plan", str(embedded_model()), *SMALL, "--json", str(path), *flags)
    assert done.returncode == 0, done.stderr
    plan = json.loads(path.read_text())
    return next(row["bytes"] for row in plan["memory"] if row["name"] == "weights"), plan["settings"]


def test_plan_shows_what_the_weights_take(run_command: RunCommand, tmp_path: Path) -> None:
    dense, settings = planned(run_command, tmp_path / "dense.json")
    assert settings["quantization"]["value"] == "none"
    (int8, _), (int4, settings) = (
        planned(run_command, tmp_path / "plan.json", "--quantization", name) for name in ("int8", "int4")
    )
    # A byte and an fp16 for 32 weights; half a byte, two bytes for 32 weights and two fp16 for 256. Of a dense weight's
    # two bytes, and four for a row, that is 53% and 29%, but embedding and head stay int8. With AMX, int4 has two fp16
    # for 32, and a row four bytes more.
    assert 0.52 * dense < int8 < 0.54 * dense and 0.29 * dense < int4 < 0.78 * int8
    assert settings["quantization"] == {"value": "int4", "from": "command line"}
    assert settings["quantization_group"]["value"] == 32
    assert (
        planned(run_command, tmp_path / "plan.json", "--quantization", "int4", "--quantization-group", "128")[0] < int4
    )


def test_a_quantised_model_writes() -> None:
    flags = ("--max-tokens", "8", "--kv-cache-memory", "16MiB", "--quantization", "int4")
    done = penstock("run", str(embedded_model()), "def add(a, b):\n    return", *flags)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 4


def test_without_native_kernels_it_says_what_to_do() -> None:
    command = (sys.executable, "-m", "penstock", "run", str(embedded_model()), "x", "--quantization", "int8")
    without = {**os.environ, "PENSTOCK_ISA": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=without)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("penstock: "))
    assert "--quantization int8 needs the native kernels" in line and "--quantization none" in line
