"""How far a rollout goes: the confidence sequence, the decision, and the judges."""

import math
import random
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from penstock.messages import RequestRejected
from penstock.messages.arrays import pack_strings, tensor_of
from penstock.messages.tensors import Tensor
from penstock.repository.rollouts.confidence import ConfidenceSequence
from penstock.repository.rollouts.decision import RolloutRules, RolloutState, decide
from penstock.repository.rollouts.judging import WITHOUT_LABELS, LabelledJudges, Pair, VersionOutcome

HOLD = 60.0


def _published(values: list[float], alpha: float) -> tuple[float, float]:
    """The interval of the paper's theorem 2, for values in [0, 1], from its definitions."""
    means, variances = [0.5], [0.25]
    for i in range(1, len(values) + 1):
        means.append((0.5 + sum(values[:i])) / (i + 1))
        variances.append((0.25 + sum((values[j] - means[j + 1]) ** 2 for j in range(i))) / (i + 1))
    weights, spread = [], 0.0
    for t, value in enumerate(values, 1):
        weights.append(min(math.sqrt(2 * math.log(2 / alpha) / (variances[t - 1] * t * math.log(1 + t))), 0.5))
        spread += 4 * (value - means[t - 1]) ** 2 * (-math.log(1 - weights[-1]) - weights[-1]) / 4
    center = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    margin = (math.log(2 / alpha) + spread) / sum(weights)
    return center - margin, center + margin


def test_the_interval_is_that_of_the_paper() -> None:
    draw = random.Random(1)
    values = [draw.betavariate(2, 5) for _ in range(150)]
    sequence = ConfidenceSequence(0.05)
    for value in values:
        sequence.add(2 * value - 1)
    low, high = _published(values, 0.05)
    assert sequence.interval == pytest.approx((2 * low - 1, 2 * high - 1), abs=1e-12)
    stored = msgspec.json.decode(msgspec.json.encode(sequence), type=ConfidenceSequence)
    assert stored.interval == sequence.interval
    with pytest.raises(ValueError, match=r"must be in \[-1, 1\]"):
        sequence.add(1.01)


@pytest.mark.parametrize("spread", [1.0, 0.05])
def test_the_interval_leaves_out_the_mean_less_often_than_alpha(spread: float) -> None:
    draw, missed, widths = random.Random(2), 0, []
    for _ in range(200):
        sequence = ConfidenceSequence(0.05)
        ever = False
        for _ in range(300):
            sequence.add(spread if draw.random() < 0.5 else -spread)
            low, high = sequence.interval
            ever = ever or not low <= 0 <= high
        missed += ever
        widths.append(high - low)
    assert missed <= 10  # 5% of 200; looked at after every value
    assert max(widths) < (0.5 if spread == 1 else 0.15)


def _rolled(differences: Callable[[int], dict[str, float]], rules: RolloutRules, requests: int) -> RolloutState:
    """The end of a rollout with a request a second, or its state after so many requests."""
    evidence, state = rules.evidence(), RolloutState(since=0.0)
    for now in range(requests):
        for judge, value in differences(now).items():
            evidence[judge].add(value)
        state = decide(evidence, state, rules, float(now))
        if state.status != "running":
            break
    return state


def test_a_candidate_that_is_equal_is_promoted_and_not_rolled_back() -> None:
    """200 runs, looked at after every request."""
    ends = []
    for seed in range(200):
        draw = random.Random(seed)
        rules = RolloutRules(hold=HOLD, tolerances={"errors": 0.06, "brier": 0.06})
        ends.append(
            _rolled(lambda _, draw=draw: {"errors": 0.0, "brier": draw.gauss(0, 0.05)}, rules, 4000).status  # type: ignore[misc]
        )
    assert ends.count("rolled back") <= 10
    assert ends.count("promoted") >= 190


@pytest.mark.parametrize(
    ("judge", "mean", "deviation", "tolerance"),
    [
        ("ndcg", 0.02, 0.08, 0.005),
        ("brier", 0.05, 0.1, 0.01),
        ("disagreement", 0.9, 0.0, 0.3),
        ("errors", 0.05, 0.0, 0.01),
    ],
)
def test_a_candidate_that_is_worse_is_rolled_back(judge: str, mean: float, deviation: float, tolerance: float) -> None:
    ends, shares = [], []
    rules = RolloutRules(hold=HOLD, tolerances={judge: tolerance})
    for seed in range(40):
        draw = random.Random(seed)

        def differences(_: int, draw: random.Random = draw) -> dict[str, float]:
            if not deviation:
                return {judge: float(draw.random() < mean)}
            return {judge: max(-1.0, min(1.0, draw.gauss(mean, deviation)))}

        end = _rolled(differences, rules, 6000)
        ends.append(end.status)
        shares.append(rules.plan[end.stage])
        assert judge in end.reason
    assert ends.count("rolled back") >= 38
    assert max(shares) < 100 and sorted(shares)[20] <= 25  # it never answers all requests


def test_stages_begin_when_their_share_is_safe() -> None:
    rules = RolloutRules(plan=(0, 10, 100), hold=HOLD, patience=1000, tolerances={"errors": 0.05})
    evidence, state = rules.evidence(), RolloutState(since=0.0)
    assert decide(evidence, state, rules, 999.0) == state  # no evidence: 10% could do too much harm
    given_up = decide(evidence, state, rules, 1000.0)
    assert given_up.status == "inconclusive" and "errors may be worse by 1.0000" in given_up.reason
    for _ in range(60):
        evidence["errors"].add(0.0)
    assert 0.05 < evidence["errors"].interval[1] < 0.5
    assert decide(evidence, state, rules, HOLD - 1) == state
    second = decide(evidence, state, rules, HOLD)
    assert (second.stage, second.since) == (1, HOLD)
    assert decide(evidence, second, rules, 2 * HOLD) == second  # all requests need more evidence
    for _ in range(2000):
        evidence["errors"].add(0.0)
    third = decide(evidence, second, rules, 2 * HOLD)
    assert third.stage == 2
    paused = msgspec.structs.replace(third, status="paused")
    assert decide(evidence, paused, rules, 900.0) == paused
    assert decide(evidence, third, rules, 3 * HOLD).status == "promoted"
    for _ in range(2000):
        evidence["errors"].add(1.0)
    assert decide(evidence, paused, rules, 900.0).status == "rolled back"  # a pause protects nobody


def test_latency_counts_at_equal_load_only() -> None:
    rules = RolloutRules(plan=(0, 50, 100), hold=0, tolerances={"latency": 0.1})
    state = decide(rules.evidence(), RolloutState(since=0.0), rules, 1.0)
    assert state.stage == 1
    assert decide(rules.evidence(), state, rules, 1.0) == state


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"plan": ()}, "plan is"),
        ({"plan": (0, 5)}, "rise to 100"),
        ({"plan": (5, 5, 100)}, "rise to 100"),
        ({"plan": (-1, 100)}, "rise to 100"),
        ({"hold": 10.0, "patience": 5.0}, "hold is 10.0 s and patience 5.0 s"),
        ({"tolerances": {"brier": 0.0}}, "the tolerance of brier is 0.0"),
    ],
)
def test_rules_that_cannot_be_are_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.convert(fields, RolloutRules)


def _pair(ours: object, theirs: object) -> Pair:
    def outcome(value: object) -> VersionOutcome:
        return VersionOutcome([tensor_of("y", "FP32", np.atleast_2d(np.asarray(value, dtype=np.float32)))], False, 0.1)

    return Pair(outcome(theirs), outcome(ours))


def _labelled() -> Iterator[tuple[str, list[float], object]]:
    yield "brier", [0.3], 1
    yield "brier", [0.2, 0.5, 0.3], 2
    yield "log_loss", [0.3], 0
    yield "log_loss", [0.2, 0.5, 0.3], 1
    yield "ndcg", [0.1, 3.0, 0.4, 0.2], [0, 1, 2, 0]


@pytest.mark.parametrize(("judge", "scores", "label"), _labelled())
def test_measures_are_those_of_scikit_learn(judge: str, scores: list[float], label: object) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    best = {1: [1.0] if label == 1 else [0.0], 3: [float(i == label) for i in range(3)]}.get(len(scores), label)
    found = LabelledJudges().difference(judge, _pair(scores, best), label)
    full = [1 - scores[0], scores[0]] if len(scores) == 1 else scores
    if judge == "ndcg":
        wanted = 1 - metrics.ndcg_score([label], [scores], k=10)
    elif judge == "log_loss":
        wanted = metrics.log_loss([label], [full], labels=range(len(full))) / 10
    else:
        wanted = sum((p - (i == label)) ** 2 for i, p in enumerate(full)) / 2
    assert found == pytest.approx(wanted, abs=1e-6)


def test_auc_is_that_of_the_pairs() -> None:
    draw, judges, total, count = random.Random(3), LabelledJudges(), 0.0, 0
    for _ in range(4000):
        label = draw.randrange(2)
        good, bad = draw.gauss(label, 1), draw.gauss(0, 1)
        found = judges.difference("auc", _pair([bad], [good]), label)
        if found is not None:
            total, count = total + found, count + 1
    area = 0.5 * (1 + math.erf(1 / 2))  # of two normal distributions, one apart
    assert count > 1000
    assert total / count == pytest.approx(area - 0.5, abs=0.05)


def test_pairs_are_compared() -> None:
    def found(judge: str, pair: Pair) -> float | None:
        return WITHOUT_LABELS[judge](pair)

    same, other = _pair([1, 2, 3], [0, 1, 9]), _pair([3, 2, 1], [1, 2, 3])
    failed = Pair(same.incumbent, VersionOutcome((), True, 0.1))
    assert (found("errors", failed), found("errors", Pair(*reversed(failed))), found("errors", same)) == (1, -1, 0)
    assert (found("disagreement", same), found("disagreement", other), found("disagreement", failed)) == (0, 1, None)
    assert found("disagreement", _pair([1], [2])) == pytest.approx(0.5)
    assert (
        found("disagreement", _pair([math.nan], [math.nan])) == 0 and found("disagreement", _pair([math.nan], [1])) == 1
    )
    texts = [VersionOutcome([Tensor("t", "BYTES", (1,), pack_strings([text]))], False, 0.1) for text in (b"a", b"b")]
    assert found("disagreement", Pair(texts[0], texts[1])) == 1
    slow = Pair(same.incumbent._replace(seconds=0.1), same.candidate._replace(seconds=0.4))
    assert found("latency", slow) == pytest.approx(0.75) and found("latency", failed) is None


@pytest.mark.parametrize(
    ("judge", "scores", "label", "named"),
    [
        ("brier", [0.5], 2, "from 0 to 1"),
        ("brier", [0.5], [1.0], "number of a class"),
        ("brier", [5.0], 1, "no probabilities"),
        ("ndcg", [0.5, 0.1], [1], "list of 2 gains"),
        ("ndcg", [0.5, 0.1], 1, "list of 2 gains"),
        ("auc", [0.1, 0.2, 0.7], 1, "has 3 numbers"),
    ],
)
def test_labels_that_do_not_fit_are_refused(judge: str, scores: list[float], label: object, named: str) -> None:
    with pytest.raises(RequestRejected, match=named):
        LabelledJudges().difference(judge, _pair(scores, scores), label)
