"""`plan fleet`: five stories, and what cannot be planned."""

import math
from dataclasses import replace

import pytest

from penstock.simulate import planner
from penstock.simulate.planner import Demand, FleetCandidate, best_change, purchase, search, verify, verify_cheapest
from penstock.simulate.prices import load_prices

PRICES = load_prices()
GPUS = ["L4", "L40S", "H100"]


def test_a_small_model_goes_on_a_small_gpu() -> None:
    demand = Demand(model="llama-3.1-8b", rate=1, prompt=300, output=150, ttft=2, tpot=0.1)
    best = search(demand, PRICES, GPUS)[0]
    assert best.replica.device in ("L4", "L40S") and best.devices <= 2
    checked = verify(demand, best, PRICES)
    assert checked.attained is not None and checked.attained >= demand.share
    assert checked.interval[0] < checked.attained <= checked.interval[1] + 1e-9


def test_a_large_model_is_divided() -> None:
    demand = Demand(model="llama-3.1-70b", rate=5, prompt=500, output=200, ttft=2, tpot=0.06)
    found = search(demand, PRICES, GPUS)
    assert all(each.replica.tensor * each.replica.pipeline > 1 or each.replica.quantization != "none" for each in found)
    assert found == sorted(found, key=lambda each: (each.hour, each.devices, each.replica.device))


def test_a_thousand_requests_a_second() -> None:
    demand = Demand(model="llama-3.1-70b", rate=1000, prompt=500, output=150, ttft=2, tpot=0.08)
    best = search(demand, PRICES, ["H100"])[0]
    assert 100 < best.devices < 2000
    ten = search(
        Demand(model="llama-3.1-70b", rate=100, prompt=500, output=150, ttft=2, tpot=0.08), PRICES, ["H100", "H200"]
    )
    assert best.hour == pytest.approx(10 * ten[0].hour, rel=0.15)


def test_a_strict_target_costs_more_and_names_its_limit() -> None:
    easy = Demand(model="llama-3.1-8b", rate=100, prompt=1000, output=200, ttft=3, tpot=0.1)
    strict = Demand(model="llama-3.1-8b", rate=100, prompt=1000, output=200, ttft=0.3, tpot=0.015)
    cheap, dear = (search(each, PRICES, ["H100"])[0] for each in (easy, strict))
    assert dear.hour > cheap.hour
    assert dear.bottleneck in ("the time of a decode step", "the time to the first token")
    change = best_change(strict, dear, PRICES)
    assert change is not None and change.hour < dear.hour


def test_a_few_requests_are_bought_and_many_are_served() -> None:
    few = Demand(model="llama-3.1-8b", rate=0.01, prompt=1000, output=300)
    many = Demand(model="llama-3.1-8b", rate=200, prompt=1000, output=300)
    small, large = (purchase(each, search(each, PRICES, GPUS), PRICES) for each in (few, many))
    assert small.provider_day < small.fleet_day and large.provider_day > large.fleet_day
    assert few.rate * 86400 * 1300 < small.break_even < many.rate * 86400 * 1300 and math.isfinite(small.break_even)


def test_a_fleet_that_costs_less_than_a_provider_is_beyond_the_break_even() -> None:
    demand = Demand(model="llama-3.1-70b", rate=5, prompt=500, output=200, ttft=2, tpot=0.06)
    found = search(demand, PRICES, ["L4", "H100"])
    bought = purchase(demand, found, PRICES)
    assert found[0].count == 1 and bought.fleet_day < bought.provider_day
    # The smallest replicas, four L4, cost less an hour and can serve little.
    assert min(each.hour / each.count for each in found) < found[0].hour
    assert bought.break_even == pytest.approx(bought.tokens_day * bought.fleet_day / bought.provider_day)


def test_requests_that_come_once_in_three_hours_can_be_simulated() -> None:
    demand = Demand(model="smollm2-135m", rate=1e-4, prompt=100, output=20)
    checked = verify(demand, search(demand, PRICES, ["CPU-2"])[0], PRICES)
    assert checked.attained == 1.0 and checked.interval[0] < 0.98


def test_the_cheapest_fleet_has_been_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    demand = Demand(model="llama-3.1-8b", rate=20, prompt=500, output=200, ttft=2, tpot=0.06)
    found = search(demand, PRICES, GPUS)
    first, second = found[:2]

    def dearer(demand: Demand, candidate: FleetCandidate, prices: object) -> FleetCandidate:
        extra = 10.0 if candidate == first else 0.0
        return replace(candidate, hour=candidate.hour + extra, attained=0.5 if candidate == second else 0.99)

    monkeypatch.setattr(planner, "verify", dearer)
    asked: list[FleetCandidate] = []
    checked = verify_cheapest(demand, found, PRICES, 1, asked.append)
    assert asked == found[:3] and checked[0].replica == found[2].replica and checked[0].attained == 0.99
    assert checked[-1].replica == second.replica  # it misses the target
    assert verify_cheapest(demand, found, PRICES, 0, asked.append) == found and len(asked) == 3


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rate": 0}, "--rate is 0"),
        ({"ttft": -1}, "--ttft is -1"),
        ({"cached": 1}, "--cached is 1"),
        ({"model": "gpt-9"}, "the model 'gpt-9' is not known"),
        ({"prompt": 200_000}, "exceed the 131072 tokens"),
        (
            {"tpot": 0.0001},
            r"no fleet of L4 serves .*: a request alone takes 0.\d+ s .*; give a longer --ttft or --tpot",
        ),
        ({"rate": 1e5}, "no fleet of L4 .*: it takes more than 400 replicas; plan for a part of --rate"),
    ],
)
def test_what_cannot_be_planned_is_one_line(fields: dict[str, object], says: str) -> None:
    base = {"model": "llama-3.1-8b", "rate": 1, "prompt": 100, "output": 100}
    with pytest.raises(ValueError, match=says) as raised:
        search(Demand(**{**base, **fields}), PRICES, ["L4"])  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_a_model_that_is_too_large_is_one_line() -> None:
    with pytest.raises(ValueError, match="do not fit; name devices with more memory"):
        search(Demand(model="llama-3.1-70b", rate=1, prompt=100, output=100), PRICES, ["CPU-2"])
