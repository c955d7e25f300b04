"""`penstock simulate` and `penstock plan fleet`, as a user calls them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_scenario_gives_a_table_json_and_a_page(run_command: RunCommand, tmp_path: Path) -> None:
    """And the same figures in a process of its own."""
    done = run_command("simulate", "batching", "--json", "a.json", "--html", "a.html")
    assert done.returncode == 0, done.stderr
    assert "throughput_rps" in done.stdout and "What is said" in done.stdout
    report = json.loads((tmp_path / "a.json").read_text())
    assert set(report["variants"]) == {"static", "dynamic", "continuous"}
    for run in report["variants"].values():
        assert len({len(column) for column in run["series"].values()}) == 1
        assert {"inference_latency_ms_p50", "batch_utilization_pct", "gpu_utilization_pct"} <= set(run["figures"])
    page = (tmp_path / "a.html").read_text()
    assert (
        "uPlot" in page
        and "http://" not in page.replace("http://www.w3.org", "")
        and not re.search(r"\{(title|about|data|plots|script)\}", page)
    )
    command = [sys.executable, "-m", "penstock", "simulate", "batching", "--json", "b.json"]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_text_in_a_scenario_is_no_markup(run_command: RunCommand, tmp_path: Path) -> None:
    show = run_command("simulate", "batch-size", "--show").stdout
    bad = show.replace("title: A larger", "title: </script><script>alert(1)</script> A larger").replace(
        "duration: 60", "duration: 2"
    )
    (tmp_path / "mine.yaml").write_text(bad)
    done = run_command("simulate", "mine.yaml", "--html", "a.html")
    assert done.returncode == 0, done.stderr
    assert "<script>alert" not in (tmp_path / "a.html").read_text()


def test_ready_scenarios_are_listed(run_command: RunCommand) -> None:
    done = run_command("simulate", "--list")
    assert done.returncode == 0 and "kv-pages" in done.stdout and "spot" in done.stdout


def test_a_fleet_is_planned(run_command: RunCommand, tmp_path: Path) -> None:
    words = ["plan", "fleet", "--model", "llama-3.1-8b", "--rate", "3", "--device", "L4", "--device", "L40S"]
    done = run_command(*words, "--tpot", "0.1", "--simulated", "1", "--json", "a.json")
    assert done.returncode == 0, done.stderr
    assert "First limit" in done.stdout and "prices of 2026" in done.stdout
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["fleets"][0]["attained"] >= 0.95 or report["fleets"][1]["attained"] is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("simulate",), "needs SCENARIO"),
        (("simulate", "nothing"), "there is no scenario 'nothing'"),
        (("simulate", "spot", "--trace", "x"), "no trace to replace"),
        (("simulate", "--fit", "x"), "--fit needs --json FILE"),
        (("simulate", "--fit", "x", "--json", "y"), "the event log x cannot be read"),
        (("simulate", "mooncake"), "the trace .* cannot be read"),
        (("simulate", "batching", "--prices", "x"), "--prices x cannot be read"),
        (("plan", "fleet", "--model", "llama-3.1-8b"), "penstock plan fleet needs --rate"),
        (("plan", "fleet", "--model", "llama-3.1-8b", "--rate", "1", "--device", "V100"), "'V100' is not known"),
    ],
)
def test_wrong_use_is_one_line(words: tuple[str, ...], says: str, run_command: RunCommand) -> None:
    done = run_command(*words)
    assert done.returncode == 2 and done.stdout == "", done
    assert len(done.stderr.splitlines()) == 1
    assert re.search(says, done.stderr), done.stderr
