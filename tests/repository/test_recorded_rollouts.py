"""Rollouts of language models on recorded evidence: what the judges found of a model and of one with a planted fault
(benchmarks/rollout_evidence.py). Each run draws its requests from the recorded ones."""

import json
import random
from pathlib import Path

import pytest

from penstock.repository.rollouts.decision import RolloutRules, RolloutState, decide

ASSET = Path(__file__).parents[1] / "assets" / "rollout_evidence.json"
RECORDED: dict[str, dict[str, list[float]]] = json.loads(ASSET.read_text())["kinds"]
TOLERANCES = {"errors": 0.05, "length": 0.05, "likelihood": 0.15}
HOLD = 60.0


def run(kind: str, seed: int, requests: int) -> tuple[RolloutState, RolloutRules]:
    """The end of a rollout with a request a second, or its state after so many requests."""
    rules, draw = RolloutRules(hold=HOLD, tolerances=TOLERANCES), random.Random(seed)
    evidence, state = rules.evidence(), RolloutState(since=0.0)
    pairs = len(RECORDED[kind]["errors"])
    for now in range(requests):
        pair = draw.randrange(pairs)
        for judge in TOLERANCES:
            evidence[judge].add(RECORDED[kind][judge][pair])
        state = decide(evidence, state, rules, float(now))
        if state.status != "running":
            break
    return state, rules


def test_an_equal_candidate_is_not_rolled_back() -> None:
    ends = [run("equal", seed, 500)[0].status for seed in range(200)]  # looked at after every request
    assert ends.count("rolled back") <= 10


@pytest.mark.parametrize("kind", ["layers swapped", "worse weights", "wrong template", "wrong stop token"])
def test_a_fault_is_rolled_back(kind: str) -> None:
    assert not any(RECORDED[kind]["errors"])  # every answer had status 200
    ends = [run(kind, seed, 3000) for seed in range(40)]
    assert sum(state.status == "rolled back" for state, _ in ends) >= 38
    shares = sorted(rules.plan[state.stage] for state, rules in ends)
    assert shares[20] <= 5 and shares[-1] <= 25  # percent of the requests when it was found
