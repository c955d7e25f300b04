"""Recorded traffic on the eight replicas of the scenario `mooncake`, and the step times of Dynamo's replay."""

from pathlib import Path

import msgspec

from penstock.simulate.costs.work import StepLoad
from penstock.simulate.scenario import Scenario, load_scenario


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
