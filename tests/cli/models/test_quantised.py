"""`penstock show` and `penstock plan` name the format of a quantised checkpoint, its bytes and its bits."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand
from tests.weights.quantised.writers import KINDS, write_floats, write_pair

TYPE = "GPTQ int4 g32"
WEIGHTS = 2 * (192 * 96 + 2 * 96 * 96 + 96 * 192 + 3 * 96 * 192)  # of two layers


def test_show_and_plan(tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _ = write_pair(write_floats(tmp_path / "floats"), tmp_path, KINDS["gptq"])
    shown = run_command("show", str(quantised), "--json")
    rows = {row["type"]: row for row in json.loads(shown.stdout)["types"]}
    assert rows[TYPE]["tensors"] == 14 and rows[TYPE]["weights"] == WEIGHTS
    assert 4.625 < rows[TYPE]["bits_per_weight"] < 5 and rows[TYPE]["bits_per_weight_in_memory"] == 4.5
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "plan.json"
    planned = run_command("plan", str(quantised), "--json", str(file))
    assert planned.returncode == 0, planned.stderr
    assert f"{TYPE} as in the file, others bfloat16" in planned.stdout
    figures = json.loads(file.read_text())
    (row,) = (row for row in figures["types"] if row["type"] == TYPE)
    assert row["bytes"] * 8 / WEIGHTS == rows[TYPE]["bits_per_weight"]
