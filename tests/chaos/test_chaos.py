"""The experiments themselves: that they run what they name, and those that no other test shows."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.__main__ import run_experiment
from tests.chaos.engine import Fault, fault_seed, planned
from tests.chaos.engine_faults import faults_at_steps, not_finite, poison, stall, tokenizer
from tests.chaos.experiments import EXPERIMENTS, Experiment, Run
from tests.chaos.machine import full_disk
from tests.chaos.network import descriptors, large_bodies, resets
from tests.chaos.report import Report, WrongFile
from tests.chaos.running import ROOT, run_tests

NAMES = [
    name
    for experiment in EXPERIMENTS
    if isinstance(experiment.run, partial) and experiment.run.func is run_tests
    for name in experiment.run.args[0]
]


@pytest.mark.parametrize("name", NAMES)
def test_the_tests_that_are_experiments_exist(name: str) -> None:
    file, _, test = name.partition("::")
    text = (ROOT / file).read_text()
    assert f"def {test}" in text if test else "def test_" in text or ".TestCase" in text


def test_a_seed_is_a_fault_or_none() -> None:
    for fault in Fault:
        found = planned(fault_seed(fault, 17, repeated=True))
        assert found is not None and (found.fault, found.step, found.repeated) == (fault, 17, True)
    assert all(planned(seed) is None for seed in (None, 0, 1, 2**31, 2**63))


def row(number: str, **figures: float) -> dict[str, Any]:
    return {"experiment": number, "what": "x", "result": "passed", "seconds": 1.0, "figures": figures}


def test_a_file_of_figures_is_filled_by_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "results" / "chaos.json"
    first = Report(path, ["F1", "2", "10"])
    first.add(row("10", ms=1.0))
    first.add(row("F1", ms=2.0))
    second = Report(path, ["F1", "2", "10"])
    second.add(row("2", ms=3.0))
    second.add(row("10", ms=4.0))
    written = json.loads(path.read_text())
    assert {"commit", "date", "hardware"} <= written.keys() and written["benchmark"] == "chaos"
    assert [(one["experiment"], one["figures"]["ms"]) for one in written["experiments"]] == [
        ("F1", 2.0),
        ("2", 3.0),
        ("10", 4.0),
    ]
    assert all(one["commit"] and one["date"] == written["date"] for one in written["experiments"])


@pytest.mark.parametrize("content", ["[]", "{", '{"hardware":{"cpu":"another"},"experiments":[]}'])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, content: str) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(WrongFile, match="another machine" if "cpu" in content else "no figures of make chaos"):
        Report(tmp_path / "file.json", [])
    assert (tmp_path / "file.json").read_text() == content


def test_an_experiment_that_fails_or_never_ends_is_a_row(tmp_path: Path) -> None:
    async def never_ends(folder: Path) -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    async def breaks(folder: Path) -> dict[str, Any]:
        raise TimeoutError("no answer")

    for number, run, why in (("1", never_ends, "no end within 0.001 minutes"), ("2", breaks, "no answer")):
        made = run_experiment(Experiment(number, "x", run), tmp_path, 1, 2, limit=0.001)
        assert (made["experiment"], made["result"]) == (number, "FAILED") and why in made["error"]


def test_the_soak_is_a_file_of_figures() -> None:
    written = json.loads((ROOT / "benchmarks/results/avx512/soak.json").read_text())
    (soak,) = written["experiments"]
    assert (written["commit"], soak["commit"], soak["experiment"]) == ("f6e0030", "f6e0030", "32")


async def test_tests_that_are_experiments_give_their_figures(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from hypothesis import settings\nsettings.register_profile('new')\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.rare\n@pytest.mark.parametrize('ms', [3, 7.5, 1])\n"
        "def test_it(ms, record_property):\n    record_property('ms', ms)\n"
    )
    figures = await run_tests([f"{tmp_path / 'test_it.py'}::test_it"], {}, tmp_path / "out")
    assert figures == {"tests_passed": 3, "ms": 7.5}


# Each takes less than 20 s. The rare ones are about code that other tests of `make test` attack as well.
SHORT = (poison, stall)
SHORT_AND_RARE = (large_bodies, tokenizer, descriptors, not_finite, faults_at_steps, resets, full_disk)


@pytest.mark.parametrize(
    "experiment", [*SHORT, *(pytest.param(experiment, marks=pytest.mark.rare) for experiment in SHORT_AND_RARE)]
)
def test_short_experiments(experiment: Run, tmp_path: Path) -> None:
    assert asyncio.run(experiment(tmp_path / "out"))
