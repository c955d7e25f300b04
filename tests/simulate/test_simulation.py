"""Whole simulations: laws of conservation in random scenarios, equal bytes for equal seeds, no clock but their own."""

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cluster.costs import FleetView
from penstock.cluster.route import RouteChoice, choose
from penstock.cluster.view import RouteRequest
from penstock.simulate.batching import BatchScheduler
from penstock.simulate.build import build
from penstock.simulate.figures import figures_of, series_of
from penstock.simulate.prices import PriceBook, load_prices
from penstock.simulate.records import Outcome
from penstock.simulate.scenario import Scenario, Targets
from penstock.simulate.simulation import Simulation
from tests.often import often
from tests.schedule.invariants import check_scheduler
from tests.simulate.virtual import RealWorldRead, virtual_world

PRICES = load_prices()
SCENARIOS = 200
ROOT = Path(__file__).parents[2]


def scenario(**fields: Any) -> Scenario:
    """A small scenario. Fields replace its own, as YAML has them."""
    base: dict[str, Any] = {
        "title": "test",
        "duration": 5.0,
        "traffic": {"a": {"name": "a", "arrivals": {"kind": "poisson", "rate": 10}, "prompt": 40, "output": 20}},
        "replicas": {"r": {"model": "smollm2-135m", "device": "L4", "kv_tokens": 4096, "max_model_len": 2048}},
    }
    return msgspec.convert({**base, **fields}, Scenario)


def run(one: Scenario, prices: PriceBook = PRICES) -> tuple[Simulation, Outcome]:
    simulation = build(one, prices, Path())
    return simulation, simulation.run()


def random_scenario(seed: int) -> Scenario:
    """Any traffic, fleet and faults."""
    chance = random.Random(f"scenario {seed}")
    rate = chance.choice([3, 20, 80])
    arrivals = chance.choice(
        [
            {"kind": "poisson", "rate": rate, "burstiness": chance.choice([0.2, 1.0, 5.0])},
            {"kind": "on_off", "rate": rate, "active": 1.0, "pause": 0.5},
            {"kind": "flash", "rate": 2, "peak": rate, "at": 1.0, "rise": 0.5, "hold": 1.0, "fall": 1.0},
            {"kind": "ramp", "low": 1, "high": rate, "steps": chance.choice([0, 4])},
            {"kind": "closed", "users": 8, "think": 0.3},
            {"kind": "burst", "requests": 40, "at": 0.5},
            {"kind": "daily", "low": 1, "high": rate, "period": 3.0},
        ]
    )
    lengths = [17, {"kind": "uniform", "low": 1, "high": 300}, {"kind": "choice", "values": [10, 200]}]
    lengths.append({"kind": "lognormal", "median": 60, "sigma": 1.0, "most": 800})
    traffic = {
        "arrivals": arrivals,
        "prompt": chance.choice(lengths),
        "output": chance.choice(lengths[:3]),
        "timeout": chance.choice([0.0, 0.0, 3.0]),
        "first_token_timeout": chance.choice([0.0, 0.0, 0.5]),
    }
    if chance.random() < 0.4:
        traffic["shared"] = {"tokens": 64, "groups": 3}
    if chance.random() < 0.3:
        traffic["session"] = {"turns": 3, "think": 0.5}
    traffic["tenant"] = chance.choice(["", "one"])
    replica = {
        "model": "smollm2-135m",
        "device": chance.choice(["L4", "CPU-2", "H100"]),
        "count": chance.choice([1, 2, 3]),
        "kv_tokens": chance.choice([1200, 4096]),
        "max_model_len": 1200 if "session" not in traffic else 4000,
        "max_num_seqs": chance.choice([1, 4, 64]),
        "max_num_batched_tokens": chance.choice([64, 2048]),
        "max_waiting": chance.choice([2, 1024]),
        "batching": chance.choice(["continuous"] * 4 + ["static", "dynamic"]),
        "batch": 4,
        "pipeline": 1,
        "start_seconds": 0.5,
        "region": "here",
        "spot": chance.random() < 0.3,
        "tenants": chance.random() < 0.2,
    }
    if "session" in traffic:
        replica["kv_tokens"] = 4096
    if chance.random() < 0.2:
        replica |= {"tensor": 3, "quantization": "int8"}
    if chance.random() < 0.2:
        replica["machines"] = 1
    faults = {
        "kill": {"kind": "kill", "at": 1.0},
        "hang": {"kind": "hang", "at": 2.0, "detect": 0.5},
        "slow": {"kind": "slow", "at": 1.5, "factor": 4.0, "seconds": 1.0},
        "cut": {"kind": "cut", "at": 2.5, "seconds": 1.0, "detect": 0.2, "region": "here"},
        "spot": {"kind": "spot", "group": "r", "every": 2.0, "notice": 0.4},
    }
    return scenario(
        seed=seed,
        router=chance.choice(["round_robin", "least_loaded", "cluster"]),
        front_seconds=chance.choice([0.0, 0.003]),
        drain=chance.choice([1.0, 300.0]),
        traffic={"a": {"name": "a", **traffic}},
        replicas={"r": replica},
        faults={name: fault for name, fault in faults.items() if chance.random() < 0.25},
    )


@pytest.mark.parametrize("block", often(range(10), range(4)))
def test_requests_blocks_tokens_and_money_are_conserved(block: int) -> None:
    ended: dict[str, int] = {}
    for seed in range(block * SCENARIOS // 10, (block + 1) * SCENARIOS // 10):
        one = random_scenario(seed)
        simulation, outcome = run(one)
        figures = figures_of(outcome, one.slo)
        # Requests in = out + refused + late + failed + open.
        states = ("done", "refused", "late", "failed", "open")
        assert figures["requests"] == sum(figures[state] or 0 for state in states) == len(outcome.requests)
        assert len({each.number for each in outcome.requests}) == len(outcome.requests)
        for state in states:
            ended[state] = ended.get(state, 0) + int(figures[state] or 0)
        # Tokens: a request that is done has all, each once; times are in order.
        for each in outcome.requests:
            if each.status == "done":
                assert each.sent == each.output, f"seed {seed}: {each}"
                assert 0 <= each.at <= each.first <= each.end
            assert each.sent <= each.output and each.cached <= each.prompt
        # Blocks: free + held + cached = all, and nothing is held for requests that have ended.
        for replica in simulation.replicas.values():
            if not isinstance(replica.scheduler, BatchScheduler):
                check_scheduler(replica.scheduler)
            flying = set(replica.in_flight)
            assert flying <= {each.number for each in outcome.requests if each.status == "open"}
            assert replica.uncached.keys() <= flying and replica.prefilling == sum(replica.uncached.values())
            if not flying and not replica.computes:
                assert not any(replica.scheduler.stats().blocks_held)
        # Money: what replicas were paid for, at their price.
        spec = one.replicas["r"]
        hour = PRICES.hour(spec.device, spot=spec.spot)
        assert outcome.totals.cost == pytest.approx(outcome.totals.device_hours * hour)
        most = outcome.totals.seconds / 3600 * spec.count * spec.tensor * spec.pipeline
        assert outcome.totals.device_hours <= most * 1.0000001
        assert outcome.totals.busy_seconds <= outcome.totals.machine_seconds * 1.001 + 1.0
    assert ended["done"] > 500 and ended["refused"] + ended["late"] > 10, ended


def test_equal_seeds_give_equal_bytes_and_others_do_not() -> None:
    assert digest(3) == digest(3) != digest(4)


def digest(seed: int) -> str:
    """A digest of everything that a scenario with faults gives."""
    one = msgspec.structs.replace(random_scenario(7), seed=seed)
    _, outcome = run(one)
    whole = [outcome.requests, outcome.timeline, figures_of(outcome, one.slo), series_of(outcome)]
    return hashlib.sha256(msgspec.json.encode(whole)).hexdigest()


def test_a_process_that_hashes_otherwise_gives_equal_bytes() -> None:
    command = [sys.executable, "-c", f"from {__name__} import digest; print(digest(3))"]
    found = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, check=True)
        for seed in ("1", "2")
    ]
    assert {each.stdout.decode().strip() for each in found} == {digest(3)}


def test_no_clock_and_no_unseeded_randomness_is_read() -> None:
    """By replacing them, so a read through any module and any name is found."""
    with virtual_world():
        for seed in range(12):
            run(random_scenario(seed))
    with virtual_world(), pytest.raises(RealWorldRead):
        random.random()
    with virtual_world(), pytest.raises(RealWorldRead):
        random.Random()
    with virtual_world(), pytest.raises(RealWorldRead):
        time.monotonic()


def test_one_request_takes_the_time_of_its_steps() -> None:
    """A prompt in one step, then a step for each further token: the cost model's seconds, and nothing else."""
    one = scenario(
        traffic={"a": {"name": "a", "arrivals": {"kind": "burst", "requests": 1}, "prompt": 40, "output": 5}}
    )
    simulation, outcome = run(one)
    (request,) = outcome.requests
    busy = simulation.replicas["r-0"].busy
    assert request.status == "done" and request.end == busy
    assert 0 < request.first < request.end


def test_the_router_decides_what_the_prefix_cache_finds() -> None:
    fields: dict[str, Any] = {
        "traffic": {
            "a": {
                "name": "a",
                "arrivals": {"kind": "even", "rate": 2},
                "prompt": 16,
                "output": 8,
                "session": {"turns": 4, "think": 0.2},
            }
        },
        "replicas": {"r": {"model": "smollm2-135m", "device": "L4", "kv_tokens": 65536, "max_model_len": 2048}},
    }
    whole = figures_of(run(scenario(**fields))[1], Targets())["prefix_hit_pct"]
    fields["replicas"]["r"]["count"] = 4
    apart = figures_of(run(scenario(**fields, router="round_robin"))[1], Targets())["prefix_hit_pct"]
    assert whole is not None and apart is not None and whole > apart > 0


def test_a_prompt_counts_for_the_router_until_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a real front: whole while it is computed in parts, else less and less, and without its cached tokens."""
    seen: list[tuple[float, float]] = []  # uncached tokens of the prompts at the replica, and those of the request

    def watched(view: FleetView, request: RouteRequest, seed: int) -> RouteChoice:
        (one,) = view.replicas
        seen.append((one.backlog_tokens + one.booked_tokens, request.prompt_tokens - request.cached.get(one.name, 0)))
        return choose(view, request, seed)

    monkeypatch.setattr("penstock.simulate.cluster_router.choose", watched)
    kinds = {"prompt": 100, "output": 8, "shared": {"tokens": 1600}}
    traffic = {"a": {"name": "a", "arrivals": {"kind": "even", "rate": 4}, **kinds}}
    replica = {"model": "smollm2-135m", "device": "CPU-2", "kv_tokens": 65536, "max_model_len": 2048}
    one = scenario(
        duration=3.0, router="cluster", traffic=traffic, replicas={"r": {**replica, "max_num_batched_tokens": 256}}
    )
    simulation, outcome = run(one)
    uncached = [tokens for _, tokens in seen]
    assert uncached[0] == 1700 and uncached[-1] < 120
    whole = partly = 0
    for place, request in enumerate(outcome.requests):
        open_ones = [uncached[each] for each in range(place) if outcome.requests[each].first > request.at]
        in_parts = sum(tokens for tokens in open_ones if tokens > 256)
        assert in_parts + 0.25 * (sum(open_ones) - in_parts) <= seen[place][0] <= sum(open_ones)
        whole, partly = whole + (in_parts > 0), partly + (seen[place][0] < sum(open_ones))
    assert whole and partly, "requests came while prompts of both kinds were computed"
    assert not any(each.prefilling or each.uncached for each in simulation.replicas.values())


def test_static_batching_keeps_rows_until_the_longest_ends() -> None:
    traffic = {
        "name": "a",
        "arrivals": {"kind": "burst", "requests": 8},
        "prompt": 10,
        "output": {"kind": "choice", "values": [5, 100]},
    }
    replica = {"model": "smollm2-135m", "device": "L4", "kv_tokens": 8192, "max_model_len": 512, "batch": 4}
    replica |= {"max_num_seqs": 4}
    slow = run(scenario(traffic={"a": traffic}, replicas={"r": {**replica, "batching": "static"}}))[1]
    fast = run(scenario(traffic={"a": traffic}, replicas={"r": replica}))[1]
    assert {each.status for each in slow.requests} == {"done"}
    ends = sorted({each.end for each in slow.requests})
    assert len(ends) == 2, "two batches of four"
    assert sum(each.end for each in fast.requests) < sum(each.end for each in slow.requests)


def test_a_contiguous_cache_runs_fewer_requests() -> None:
    figures = {}
    for kv in ("paged", "contiguous"):
        replica = {"model": "smollm2-135m", "device": "L4", "kv_tokens": 4096, "max_model_len": 1024, "kv": kv}
        traffic = {"name": "a", "arrivals": {"kind": "burst", "requests": 30}, "prompt": 100, "output": 100}
        figures[kv] = figures_of(run(scenario(traffic={"a": traffic}, replicas={"r": replica}))[1], Targets())
    filled = [figures[kv]["kv_filled_pct"] or 0.0 for kv in ("contiguous", "paged")]
    assert filled[0] < 30 and filled[1] > 90
    assert (figures["paged"]["throughput_rps"] or 0) > 1.5 * (figures["contiguous"]["throughput_rps"] or 0)


def test_requests_of_a_replica_that_ends_go_on_elsewhere_from_their_last_token() -> None:
    one = scenario(
        replicas={
            "r": {"model": "smollm2-135m", "device": "CPU-2", "kv_tokens": 8192, "max_model_len": 2048, "count": 2}
        },
        traffic={"a": {"name": "a", "arrivals": {"kind": "burst", "requests": 6}, "prompt": 40, "output": 300}},
        faults={"kill": {"kind": "kill", "at": 1.0, "replica": "r-0", "restart": False}},
    )
    simulation, outcome = run(one)
    assert {each.status for each in outcome.requests} == {"done"}
    moved = [each for each in outcome.requests if each.moves]
    assert len(moved) == 3 and all(each.replica == "r-1" and each.first < 1e9 for each in moved)
    computed = sum(replica.scheduler.stats().decode_tokens for replica in simulation.replicas.values())
    assert computed < 6 * 300, "what had been sent was not sampled again"
    assert any("ends with 3 requests" in what for _, what in outcome.timeline)


@pytest.mark.parametrize("seed", range(12))
def test_prompts_are_computed_apart_whatever_ends(seed: int) -> None:
    """Long prompts beside long answers; replicas of either role end, hang and become slow."""
    replica = {
        "model": "smollm2-135m",
        "device": "CPU-2",
        "kv_tokens": 20_000,
        "max_model_len": 2048,
        "max_num_seqs": 16,
    }
    one = scenario(
        seed=seed,
        router="cluster",
        replicas={
            "p": {**replica, "role": "prefill", "count": 2, "start_seconds": 0.5},
            "d": {**replica, "role": "decode", "count": 2, "start_seconds": 0.5},
        },
        traffic={
            "long": {"name": "long", "arrivals": {"kind": "poisson", "rate": 3}, "prompt": 1000, "output": 8},
            "chat": {"name": "chat", "arrivals": {"kind": "poisson", "rate": 8}, "prompt": 30, "output": 100},
        },
        faults={
            "kill": {"kind": "kill", "at": 1.5, "replica": "p" if seed % 2 else "d"},
            "hang": {"kind": "hang", "at": 3.0, "detect": 0.5, "replica": "d" if seed % 2 else "p"},
        },
    )
    simulation, outcome = run(one)
    assert {each.status for each in outcome.requests} == {"done"}
    assert all(each.sent == each.output and each.at < each.first <= each.end for each in outcome.requests)
    for each in simulation.replicas.values():
        check_scheduler(each.scheduler)
        assert not each.in_flight and not any(each.scheduler.stats().blocks_held)
    prefill = [each for name, each in simulation.replicas.items() if name.startswith("p")]
    assert sum(each.scheduler.stats().computed_tokens for each in prefill) > 900, "they had prompts to compute"
