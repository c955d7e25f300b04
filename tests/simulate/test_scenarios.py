"""The ready scenarios, and wrong ones."""

from pathlib import Path
from typing import Any

import pytest

from penstock.simulate.build import build
from penstock.simulate.claims import judge
from penstock.simulate.figures import figures_of
from penstock.simulate.prices import load_prices
from penstock.simulate.scenario import load_scenario, ready_scenarios

QUICK = ("batching", "kv-pages")
GOOD = """
title: good
duration: 1
traffic: {a: {arrivals: {kind: poisson, rate: 1}}}
replicas: {r: {model: smollm2-135m, device: L4}}
"""


def figures(name: str, **changes: Any) -> dict[str, dict[str, float | None]]:
    file = load_scenario(name, changes)
    runs = {key: (build(one, load_prices(), file.folder), one) for key, one in file.variants.items()}
    return {key: figures_of(simulation.run(), one.slo) for key, (simulation, one) in runs.items()}


def load_and_build(name: str) -> None:
    file = load_scenario(name)
    for one in file.variants.values():
        build(one, load_prices(), file.folder)


@pytest.mark.parametrize("name", ready_scenarios())
def test_every_ready_scenario_can_be_built(name: str) -> None:
    file = load_scenario(name)
    assert file.title and file.about
    load_and_build(name)


def test_there_are_a_dozen() -> None:
    assert len(ready_scenarios()) >= 12


@pytest.mark.parametrize("name", QUICK)
def test_what_is_said_of_quick_scenarios_is_judged(name: str) -> None:
    file = load_scenario(name)
    found = figures(name)
    verdicts = [judge(claim, found) for claim in file.claims]
    assert all(verdict.value is not None for verdict in verdicts)
    assert verdicts[0].holds, verdicts[0].text


def test_the_scenario_of_the_page_can_be_built(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert len(load_scenario(str(path)).variants) == 2
    load_and_build(str(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("rate: 1", "rate: fast"), r"Expected `float`, got `str` - at `\$.traffic\[...\].arrivals.rate`"),
        (("rate: 1", "rate: -1"), "rate -1.0: give 0 to"),
        (("poisson", "weibull"), "Invalid value 'weibull'"),
        (("duration: 1", "duration: 0"), "duration is 0, but not all traffic is a trace"),
        (("duration: 1", "lasts: 1"), "unknown field `lasts`"),
        (("device: L4", "device: V100"), "the device 'V100' is not known"),
        (("smollm2-135m", "gpt-9"), "the model 'gpt-9' is not known"),
        (("device: L4", "device: L4, tensor: 2"), "2"),
        (("title: good", "title: good\nrouter: best"), "the router 'best' is not known"),
        (("title: good", "title: good\nfaults: {k: {kind: kill, replica: x}}"), "concerns 'x', which does not exist"),
        (("title: good", "title: good\nfaults: {c: {kind: cut, region: x}}"), "concerns 'x', which does not exist"),
        (("title: good", "title: good\nfaults: {s: {kind: spot, group: r, every: 0}}"), "every 0.0: give 1 second"),
        (("rate: 1}", "rate: 1}, weight: 0"), "weight 0.0: give a number above 0"),
        (("smollm2-135m, device: L4", "llama-3.1-70b, device: L4"), "llama-3.1-70b on 1 x L4: the model does not fit"),
        (("{a: {arrivals: {kind: poisson, rate: 1}}}", "{}"), "no traffic"),
        (("title: good", "- 1"), "line 3: not valid YAML"),
        (("{a: {arrivals", "{a: {model: large, arrivals"), "is for 'large', which no replica has"),
    ],
)
def test_a_wrong_scenario_is_one_line(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(ValueError, match=says) as raised:
        load_and_build(str(path))
    assert "\n" not in str(raised.value)


def test_a_scenario_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no scenario 'nothing'.* one of batch-size, batching"):
        load_scenario("nothing")


def test_a_claim_about_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + "claims: [{says: x, figure: cost, of: other}]\n")
    with pytest.raises(ValueError, match="a claim names the variant 'other'"):
        load_scenario(str(path))
