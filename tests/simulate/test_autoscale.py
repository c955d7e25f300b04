"""The autoscaler in a simulation: replicas start before a spike that yesterday had, and drain after it."""

from pathlib import Path
from typing import Any

import pytest

from penstock.simulate.build import build
from penstock.simulate.figures import figures_of
from penstock.simulate.prices import load_prices
from penstock.simulate.records import Outcome
from penstock.simulate.scenario import load_scenario
from penstock.simulate.simulation import Simulation

SPIKE = """
title: spike
duration: 1500
drain: 60
slo: {ttft: 1.0}
traffic:
  chat:
    arrivals: {kind: flash, rate: 0.4, peak: 3, at: 600, rise: 10, hold: 300, fall: 10}
    prompt: 300
    output: 60
replicas:
  engine: {model: llama-3.1-8b, device: CPU-32, count: 12, max_num_seqs: 32, start_seconds: 90}
autoscale:
  load: {group: engine, capacity: 500}
variants:
  hpa: {autoscale: {load: {scaler: hpa}}}
  blind: {}
  forecast: {autoscale: {load: {yesterday: 0.9}}}
  warm: {autoscale: {load: {policy: {standby: 2}}}}
  oracle: {autoscale: {load: {scaler: oracle}}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Simulation, Outcome, dict[str, Any]]]:
    path = tmp_path_factory.mktemp("autoscale") / "spike.yaml"
    path.write_text(SPIKE)
    found = {}
    for name, scenario in load_scenario(str(path)).variants.items():
        simulation = build(scenario, load_prices(), Path())
        outcome = simulation.run()
        found[name] = simulation, outcome, figures_of(outcome, scenario.slo)
    return found


def test_a_forecast_holds_the_target_and_costs_little_more_than_an_oracle(runs: dict[str, Any]) -> None:
    figures = {name: run[2] for name, run in runs.items()}
    attained = {name: each["attained_pct"] for name, each in figures.items()}
    assert attained["forecast"] >= 99 and attained["oracle"] >= 99
    assert attained["hpa"] < attained["forecast"] and attained["blind"] < attained["forecast"]
    assert attained["warm"] > attained["blind"]
    hours = {name: each["machine_hours"] for name, each in figures.items()}
    assert hours["oracle"] < hours["forecast"] <= 1.15 * hours["oracle"]
    assert hours["forecast"] < hours["blind"] < hours["warm"]


def test_replicas_drain_before_they_end(runs: dict[str, Any]) -> None:
    for _, outcome, figures in runs.values():
        assert figures["failed"] == 0 and figures["moves"] == 0
        counts = [sample.replicas for sample in outcome.samples]
        assert max(counts) > counts[0] > 0
        assert any("to" in what and "replicas" in what for _, what in outcome.timeline)
    counts = [sample.replicas for sample in runs["oracle"][1].samples]
    assert counts[-1] < max(counts)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("group: engine", "group: other"), "autoscale 'load' is of 'other', which does not exist: name one of"),
        (("capacity: 500", "capacity: 0"), "capacity 0.0: give 0.001 to"),
        (("policy: {standby: 2}", "policy: {spare: 2}"), "unknown field `spare`"),
        (("scaler: oracle", "scaler: guess"), "Invalid enum value 'guess'"),
    ],
)
def test_a_wrong_autoscaler_is_one_line(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SPIKE.replace(*change))
    with pytest.raises(ValueError, match=says) as raised:
        load_scenario(str(path))
    assert "\n" not in str(raised.value)
