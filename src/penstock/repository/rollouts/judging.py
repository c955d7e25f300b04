"""Compares the answers of two versions to one request: how much worse is the candidate's, in [-1, 1]."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.messages import RequestRejected
from penstock.messages.arrays import read_array
from penstock.messages.tensors import Tensor
from penstock.repository.rollouts.decision import TOLERANCES

MAX_RANKED = 10_000  # entries of a label for ndcg
_MOST_LOSS = 10.0  # of log_loss; a probability of 0.00005


class VersionOutcome(NamedTuple):
    """What a version made of a request."""

    outputs: Sequence[Tensor]  # () if it failed
    failed: bool
    seconds: float


class Pair(NamedTuple):
    """What both versions made of a request."""

    incumbent: VersionOutcome
    candidate: VersionOutcome


Judge = Callable[[Pair], float | None]  # None: the pair says nothing


def errors(pair: Pair) -> float:
    """1 if only the candidate failed."""
    return float(pair.candidate.failed) - float(pair.incumbent.failed)


def latency(pair: Pair) -> float | None:
    """The difference of the times, of the longer one. Its mean is 0 if both have one distribution."""
    if pair.candidate.failed or pair.incumbent.failed:
        return None
    ours, theirs = pair.candidate.seconds, pair.incumbent.seconds
    return (ours - theirs) / max(ours, theirs, 1e-9)


def disagreement(pair: Pair) -> float | None:
    """The share of rows in which the largest number of the first output is another one. An output with one number in a
    row disagrees as far as the numbers differ, of the larger one; one of texts, or of another shape, disagrees if it
    differs."""
    if pair.candidate.failed or pair.incumbent.failed:
        return None
    ours, theirs = pair.candidate.outputs[0], pair.incumbent.outputs[0]
    if ours.shape != theirs.shape or ours.datatype != theirs.datatype:
        return 1.0
    if ours.datatype in ("BYTES", "BF16", "BOOL"):
        return float(bytes(ours.data) != bytes(theirs.data))
    a, b = _rows(ours), _rows(theirs)
    if not a.size:
        return 0.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float(not np.array_equal(a, b, equal_nan=True))
    if a.shape[1] > 1:
        return float(np.mean(a.argmax(axis=1) != b.argmax(axis=1)))
    return float(np.mean(np.minimum(np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), 1e-30), 1.0)))


WITHOUT_LABELS: Mapping[str, Judge] = {"errors": errors, "latency": latency, "disagreement": disagreement}


class LabelledJudges:
    """Judges that need a label. They read the first output of a request with one row: the probability of class 1 if it
    is one number, the probabilities of all classes, or the scores of a list that `ndcg` ranks."""

    def __init__(self) -> None:
        self._waiting: dict[bool, tuple[float, float]] = {}  # for auc: scores without partner, by class

    def difference(self, judge: str, pair: Pair, label: Any) -> float | None:
        """Returns how much worse the candidate's answer is. Raises RequestRejected for a label that does not fit."""
        if pair.incumbent.failed or pair.candidate.failed:
            return None
        ours, theirs = (_rows(each.outputs[0]).reshape(-1) for each in (pair.candidate, pair.incumbent))
        if judge == "auc":
            return self._auc(_score(ours), _score(theirs), _class(label, 2) == 1)
        measure = MEASURES[judge]
        return measure(ours, label) - measure(theirs, label)

    def _auc(self, ours: float, theirs: float, positive: bool) -> float | None:
        """Of two requests with different labels, each in one pair only: 1 if only the candidate orders them wrongly."""
        partner = self._waiting.pop(not positive, None)
        if partner is None:
            self._waiting[positive] = ours, theirs
            return None
        sign = 1 if positive else -1
        wrong = [_wrong(sign * (mine - other)) for mine, other in zip((ours, theirs), partner, strict=True)]
        return wrong[0] - wrong[1]


def _brier(scores: Any, label: Any) -> float:
    """Half the squared distance of the probabilities from the label; in [0, 1]."""
    found = _probabilities(scores)
    found[_class(label, len(found))] -= 1
    return min(float(np.sum(found**2)) / 2, 1.0)


def _log_loss(scores: Any, label: Any) -> float:
    """-log of the label's probability, of the most that counts; in [0, 1]."""
    found = _probabilities(scores)
    return min(-math.log(max(float(found[_class(label, len(found))]), 1e-30)), _MOST_LOSS) / _MOST_LOSS


def _ndcg(scores: Any, label: Any) -> float:
    """1 - NDCG@10 of a list. The label has a gain of at least 0 for each entry."""
    fits = isinstance(label, list) and 0 < len(label) == len(scores) <= MAX_RANKED
    if not fits or not all(isinstance(gain, int | float) and 0 <= gain < 1e9 for gain in label):
        raise RequestRejected(f"label must be a list of {len(scores)} gains of at least 0, one for each score")
    gains = np.asarray(label, dtype=float)
    discounts = 1 / np.log2(np.arange(2, 12))
    best = np.sort(gains)[::-1][:10]
    if not best[0]:
        return 0.0
    found = gains[np.argsort(-scores, kind="stable")[:10]]
    return 1 - float(found @ discounts[: len(found)] / (best @ discounts[: len(best)]))


MEASURES: Mapping[str, Callable[[Any, Any], float]] = {"brier": _brier, "log_loss": _log_loss, "ndcg": _ndcg}
WITH_LABELS = (*MEASURES, "auc")
# What judges tolerate by default. 0: they are used if the rules name them.
JUDGES: Mapping[str, float] = {**dict.fromkeys((*WITHOUT_LABELS, *WITH_LABELS), 0.0), **TOLERANCES}


def _rows(tensor: Tensor) -> Any:
    """The numbers as an array of two dimensions. Raises RequestRejected for an output without numbers."""
    if tensor.datatype in ("BYTES", "BF16"):
        raise RequestRejected(
            f"output {tensor.name!r} has the datatype {tensor.datatype}, which has no numbers to judge"
        )
    array = read_array(tensor.data, tensor.datatype, tensor.shape).astype(float)
    return array.reshape(array.shape[0] if array.ndim > 1 else 1, -1)


def _probabilities(scores: Any) -> Any:
    """Those of all classes; one number is that of class 1."""
    found = np.array([1 - scores[0], scores[0]]) if len(scores) == 1 else np.array(scores)
    if not (np.isfinite(found).all() and (found >= 0).all() and abs(found.sum() - 1) < 1e-3):
        raise RequestRejected("the first output has no probabilities: they must be at least 0, and have the sum 1")
    return found


def _score(scores: Any) -> float:
    """The score of class 1."""
    if len(scores) > 2:
        raise RequestRejected(
            f"auc needs one score, or those of two classes; the first output has {len(scores)} numbers"
        )
    return float(scores[-1])


def _class(label: Any, classes: int) -> int:
    if not isinstance(label, int) or not 0 <= label < classes:
        raise RequestRejected(f"label is {label!r:.40}; it must be the number of a class, from 0 to {classes - 1}")
    return int(label)


def _wrong(difference: float) -> float:
    return 0.5 if difference == 0 else float(difference < 0)
