"""Implements `penstock route evaluate`: what a route would have cost, and what its answers would have been worth."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.cli.models.table import print_table
from penstock.cli.route.labels import Label, read_labels
from penstock.frontend.providers.difficulty import features, read_classifier

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)  # of requests that the large model answers, for which limits are shown


class RouteOutcome(NamedTuple):
    """The means over all labels, of one way to choose."""

    way: str
    large: float  # share of requests that the large model answers
    cost: float
    quality: float
    mixed: float  # quality of choosing at random, at the same cost


def evaluate_file(path: str, classifier: str | None) -> None:
    """Prints the table of a file of labels. Raises ValueError."""
    labels = read_labels(path)
    scores = None
    if classifier is not None:
        made = read_classifier(classifier, "--classifier")
        scores = [made.probability(features(label.request)) for label in labels]
    print_table(
        [
            {
                "CHOICE": each.way,
                "LARGE": f"{each.large:.1%}",
                "COST": f"{each.cost:.4g}",
                "QUALITY": f"{each.quality:.4f}",
                "AT RANDOM": f"{each.mixed:.4f}",
            }
            for each in outcomes(labels, scores)
        ]
    )


def outcomes(labels: Sequence[Label], scores: Sequence[float] | None) -> Iterator[RouteOutcome]:
    """Yields what each way to choose costs and gives: one model alone, the classifier by its `scores`, and a cascade if
    labels have log-probabilities. A cascade also pays for the small answers that it refuses."""
    yield _outcome(labels, "small alone", [False] * len(labels))
    if scores is not None:
        for limit in _limits(scores):
            yield _outcome(labels, f"probability: {limit:.4g}", [score < limit for score in scores])
    logprobs = [label.logprob for label in labels if label.logprob is not None]
    if len(logprobs) == len(labels):
        for limit in _limits(logprobs):
            refused = [logprob < limit for logprob in logprobs]
            yield _outcome(labels, f"logprob: {limit:.4g}", refused, cascade=True)
    yield _outcome(labels, "large alone", [True] * len(labels))


def _limits(scores: Sequence[float]) -> list[float]:
    """The limits below which about SHARES of the scores are."""
    ordered = sorted(scores)
    return sorted({ordered[int(share * len(ordered))] for share in SHARES})


def _outcome(labels: Sequence[Label], way: str, large: Sequence[bool], *, cascade: bool = False) -> RouteOutcome:
    count = len(labels)
    low, high = (sum(each) / count for each in zip(*((label.small, label.large) for label in labels), strict=True))
    cheap = sum(label.small_cost for label in labels) / count
    dear = sum(label.large_cost for label in labels) / count
    cost = quality = 0.0
    for label, to_large in zip(labels, large, strict=True):
        quality += (label.large if to_large else label.small) / count
        cost += (label.large_cost if to_large else 0.0) / count
        cost += (label.small_cost if cascade or not to_large else 0.0) / count
    share = (cost - cheap) / (dear - cheap) if dear > cheap else 0.0
    return RouteOutcome(way, sum(large) / count, cost, quality, low + min(share, 1.0) * (high - low))
