"""Rollouts on recorded evidence: what the judges found of a model and of one with a planted fault, for language models
(benchmarks/rollout_evidence.py) and one-shot models (benchmarks/oneshot_evidence.py). Each run draws its requests from
the recorded ones."""

import json
import random
from pathlib import Path

import pytest

from penstock.repository.rollouts.decision import RolloutRules, RolloutState, decide

ASSETS = Path(__file__).parents[1] / "assets"
RECORDED: dict[str, dict[str, list[float]]] = {
    kind: judges
    for name in ("rollout_evidence.json", "oneshot_evidence.json")
    for kind, judges in json.loads((ASSETS / name).read_text())["kinds"].items()
}
TEXTS = {"errors": 0.05, "length": 0.05, "likelihood": 0.15}
CLASSIFIER, RANKER = {"errors": 0.05, "brier": 0.01}, {"errors": 0.05, "ndcg": 0.005}
HOLD = 60.0


def run(kind: str, tolerances: dict[str, float], seed: int, requests: int) -> tuple[RolloutState, RolloutRules]:
    """The end of a rollout with a request a second, or its state after so many requests."""
    rules, draw = RolloutRules(hold=HOLD, tolerances=tolerances), random.Random(seed)
    evidence, state = rules.evidence(), RolloutState(since=0.0)
    pairs = len(RECORDED[kind]["errors"])
    for now in range(requests):
        pair = draw.randrange(pairs)
        for judge in tolerances:
            evidence[judge].add(RECORDED[kind][judge][pair])
        state = decide(evidence, state, rules, float(now))
        if state.status != "running":
            break
    return state, rules


@pytest.mark.parametrize(
    ("kind", "tolerances"), [("equal", TEXTS), ("equal classifier", CLASSIFIER), ("equal ranker", RANKER)]
)
def test_an_equal_candidate_is_not_rolled_back(kind: str, tolerances: dict[str, float]) -> None:
    ends = [run(kind, tolerances, seed, 300)[0].status for seed in range(200)]  # looked at after every request
    assert ends.count("rolled back") <= 10


@pytest.mark.parametrize(
    ("kind", "tolerances"),
    [
        *((kind, TEXTS) for kind in ("layers swapped", "worse weights", "wrong template", "wrong stop token")),
        ("worse classifier", CLASSIFIER),
        ("worse ranker", RANKER),
    ],
)
def test_a_fault_is_rolled_back(kind: str, tolerances: dict[str, float]) -> None:
    assert not any(RECORDED[kind]["errors"])  # every answer had status 200
    ends = [run(kind, tolerances, seed, 3000) for seed in range(40)]
    assert sum(state.status == "rolled back" for state, _ in ends) >= 38
    shares = sorted(rules.plan[state.stage] for state, rules in ends)
    assert shares[20] <= 5 and shares[-1] <= 25  # percent of the requests when it was found
