"""`penstock plan --repository`: what the engines of a repository hold together."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, settings in (("small", "kv-cache-memory: 32MiB"), ("other", "max-num-seqs: 4")):
        (tmp_path / "models" / name).mkdir(parents=True)
        text = f"model: python-8m\nsettings: {{{settings}}}\n"
        (tmp_path / "models" / name / "model.yaml").write_text(text)
    return tmp_path / "models"


def test_a_set_shares_the_memory(run_command: RunCommand, repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = run_command("plan", "--repository", str(repository), "--json", str(file))
    assert result.returncode == 0, result.stderr
    plan = json.loads(file.read_text())
    assert plan["engines"] == 2 and plan["refused"] == []
    rows = {row["name"]: row for row in plan["models"]}
    assert set(rows) == {"small", "other"} and rows["small"]["kv_cache"] == 32 << 20
    assert sum(row["fixed"] + row["kv_cache"] for row in plan["models"]) <= plan["memory"]
    assert "other" in result.stdout and "2 engines at a time share" in result.stdout

    beside = run_command("plan", "python-8m", "--repository", str(repository), "--max-loaded", "1", "--json", str(file))
    assert beside.returncode == 0, beside.stderr
    plan = json.loads(file.read_text())
    assert plan["engines"] == 2 and len(plan["models"]) == 3


def test_what_cannot_fit_is_refused_by_name(run_command: RunCommand, repository: Path) -> None:
    (repository / "small" / "model.yaml").write_text("model: python-8m\nsettings: {kv-cache-memory: 900TiB}\n")
    result = run_command("plan", "--repository", str(repository))
    assert result.returncode != 0 and "small: " in result.stderr and "cannot be loaded here" in result.stderr
    assert "other" in result.stdout
