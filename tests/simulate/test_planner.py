"""`plan fleet`: five stories, and what cannot be planned."""

import math

import pytest

from penstock.simulate.planner import Demand, best_change, purchase, search, verify
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


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rate": 0}, "--rate is 0"),
        ({"ttft": -1}, "--ttft is -1"),
        ({"cached": 1}, "--cached is 1"),
        ({"model": "gpt-9"}, "the model 'gpt-9' is not known"),
        ({"prompt": 200_000}, "exceed the 131072 tokens"),
        ({"tpot": 0.0001}, "no fleet of L4 serves .*: allow longer times"),
        ({"model": "llama-3.1-70b", "rate": 1e5}, "no fleet of L4"),
    ],
)
def test_what_cannot_be_planned_is_one_line(fields: dict[str, object], says: str) -> None:
    base = {"model": "llama-3.1-8b", "rate": 1, "prompt": 100, "output": 100}
    with pytest.raises(ValueError, match=says) as raised:
        search(Demand(**{**base, **fields}), PRICES, ["L4"])  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
