"""The experiments themselves: that they run what they name, and those that no other test shows."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.engine import Fault, fault_seed, planned
from tests.chaos.engine_faults import not_finite, poison
from tests.chaos.experiments import EXPERIMENTS, Run
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


@pytest.mark.rare
@pytest.mark.parametrize("experiment", [not_finite, poison])
def test_one_request_fails_alone(experiment: Run, tmp_path: Path) -> None:
    assert asyncio.run(experiment(tmp_path))
