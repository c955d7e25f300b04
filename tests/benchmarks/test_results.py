"""Where figures come from, and how two trees are compared."""

import subprocess
from pathlib import Path

import pytest
from before_after import Run as TimedRun
from before_after import interval, parse_flags, summary
from results import commit_of, provenance


def test_figures_name_their_commit_and_machine() -> None:
    found = provenance({"vllm": "0.32.0"})
    assert set(found) == {"commit", "date", "hardware", "peers"}
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["cpu"] and found["hardware"]["isa"]
    assert "peers" not in provenance()


def test_a_changed_tree_is_dirty_but_not_by_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMIT", raising=False)
    assert commit_of(tmp_path) == "unknown"
    monkeypatch.setenv("COMMIT", "abc1234")
    assert commit_of(tmp_path) == "abc1234"
    (tmp_path / "code.py").write_text("1\n")
    for command in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "first"),
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = commit_of(tmp_path)
    assert clean not in ("unknown", "abc1234") and not clean.endswith("-dirty")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "one.json").write_text("{}")
    assert commit_of(tmp_path) == clean
    (tmp_path / "code.py").write_text("2\n")
    assert commit_of(tmp_path) == f"{clean}-dirty"


def test_the_interval_is_that_of_the_sign_test() -> None:
    assert interval([float(i) for i in range(10)]) == (1.0, 8.0, 0.9785)
    assert interval([float(i) for i in range(6)]) == (0.0, 5.0, 0.9688)
    assert interval([2.0, 1.0, 3.0]) == (1.0, 3.0, 0.75)  # too few for 95%
    assert interval([1.0]) == (1.0, 1.0, 0.0)


def test_a_ratio_is_of_the_two_runs_of_a_pair() -> None:
    runs = {"old": [TimedRun(10.0, 100.0), TimedRun(20.0, 300.0)], "new": [TimedRun(11.0, 90.0), TimedRun(24.0, 270.0)]}
    found = summary(runs)
    assert found["ratios"] == [1.1, 1.2] and found["ratio"] == 1.15
    assert found["host_us_per_step"] == {"old": 200.0, "new": 180.0}


def test_flags_of_a_variant() -> None:
    assert parse_flags("") == {}
    assert parse_flags("--quantization int8 --threads 2") == {"quantization": "int8", "threads": "2"}
    with pytest.raises(ValueError, match="--quantization int8"):
        parse_flags("quantization int8")
