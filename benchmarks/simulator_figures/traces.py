"""Recorded traffic at several speeds, with our step times and with those of Dynamo's replay."""

from pathlib import Path
from typing import Any

import msgspec

from penstock.simulate.build import build
from penstock.simulate.costs.work import StepLoad
from penstock.simulate.figures import figures_of
from penstock.simulate.prices import load_prices
from penstock.simulate.scenario import Scenario, load_scenario

ROUTERS = ("round_robin", "cluster")
SHOWN = ("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_p99", "prefix_hit_pct", "attained_pct")


def mooncake(trace: Path, router: str, speed: float = 1.0) -> Scenario:
    """The scenario `mooncake` with another file for its trace."""
    scenario = load_scenario("mooncake", {"router": router}).variants[router]
    spec = scenario.traffic["conversation"]
    assert spec.trace is not None
    recorded = msgspec.structs.replace(spec.trace, file=str(trace.absolute()), speed=speed)
    return msgspec.structs.replace(scenario, traffic={"conversation": msgspec.structs.replace(spec, trace=recorded)})


class DynamoCost:
    """The default step times of Dynamo's mocker (lib/mocker, aisimulate-engine): polynomials in the tokens of prompts
    and in the share of the KV cache that decodes read."""

    stages = 1

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens

    def seconds(self, work: StepLoad) -> float:
        """See StepCostModel."""
        ms = 0.0
        if work.prompt_tokens:
            ms += 4.209989e-07 * work.prompt_tokens**2 + 1.518344e-02 * work.prompt_tokens + 16.50142
        if work.decodes:
            share = min(work.decode_context / self._kv_tokens, 1.0)
            ms += max(-25.74 * share**2 + 54.01 * share + 5.74, 1.0)
        return ms / 1e3


def trace_figures(trace: Path, speeds: list[float], cost: str) -> dict[str, Any]:
    """Returns the figures of our routers at each speed of a trace, with step times of `cost`: ours, or Dynamo's."""
    found: dict[str, Any] = {}
    for speed in speeds:
        for router in ROUTERS:
            one = mooncake(trace, router, speed)
            simulation = build(one, load_prices(), Path())
            for replica in simulation.replicas.values() if cost == "dynamo" else ():
                replica.cost = DynamoCost(replica.kv_tokens)
            figures = figures_of(simulation.run(), one.slo)
            found[f"x{speed:g} {router}"] = {name: _rounded(figures[name]) for name in SHOWN}
            print(f"x{speed:g} {router}: {found[f'x{speed:g} {router}']}", flush=True)
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
