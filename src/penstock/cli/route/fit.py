"""Implements `penstock route fit`: logistic regression with NumPy."""

import msgspec
import numpy as np

from penstock.cli.output import write_file
from penstock.cli.route.labels import Label, read_labels
from penstock.frontend.providers.difficulty import BUCKETS, MEASURES, Classifier, features
from penstock.prepare.files import check_file

FOLDS = 5  # each label is judged by a classifier that has not seen it
LEAST_LABELS = 20
_PENALTY = 1.0  # on squared weights of scaled features
_STEPS = 50  # of Newton's method; it needs about ten


def fit_file(path: str, out: str) -> None:
    """Writes the classifier of a file of labels, and prints how good it is. Raises ValueError."""
    check_file("--out", out)
    labels = read_labels(path)
    good = sum(label.small >= label.large for label in labels)
    if len(labels) < LEAST_LABELS or good in (0, len(labels)):
        counts = f"{len(labels)} labels, {good} of them with a small answer that is as good as the large one"
        raise ValueError(f"LABELS {path} has {counts}; give at least {LEAST_LABELS}, and some of both kinds")
    right = sum(
        (probability >= 0.5) == (label.small >= label.large)
        for label, probability in zip(labels, held_out(labels), strict=True)
    )
    write_file("--out", out, msgspec.json.encode(fit(labels)).decode() + "\n")
    most = max(good, len(labels) - good) / len(labels)
    print(f"{len(labels)} labels, {good} with a small answer that is as good as the large one")
    print(f"right for {right / len(labels):.1%} of labels that were left out; always one answer: {most:.1%}")


def held_out(labels: list[Label]) -> list[float]:
    """Returns a probability for each label, by a classifier that is fitted to the other folds."""
    found = [0.0] * len(labels)
    for fold in range(FOLDS):
        classifier = fit([label for i, label in enumerate(labels) if i % FOLDS != fold])
        for i in range(fold, len(labels), FOLDS):
            found[i] = classifier.probability(features(labels[i].request))
    return found


def fit(labels: list[Label]) -> Classifier:
    """Returns the logistic regression of "the small answer is as good as the large one" with a penalty on squared
    weights, by Newton's method (iteratively reweighted least squares)."""
    table = np.zeros((len(labels), MEASURES + BUCKETS))
    for row, label in zip(table, labels, strict=True):
        for place, value in features(label.request).items():
            row[place] = value
    wanted = np.array([float(label.small >= label.large) for label in labels])
    mean, scale = table.mean(0), table.std(0)
    scale[scale == 0] = np.inf  # a feature that is the same for all labels gets no weight
    scaled = np.column_stack([np.ones(len(labels)), (table - mean) / scale])
    penalty = np.full(scaled.shape[1], _PENALTY)
    penalty[0] = 1e-6  # the bias is free
    weights = np.zeros(scaled.shape[1])
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(scaled @ weights, -30, 30)))
        gradient = scaled.T @ (wanted - chance) - penalty * weights
        curvature = (scaled * (chance * (1 - chance))[:, None]).T @ scaled + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights += step
        if np.abs(step).max() < 1e-8:
            break
    made = weights[1:] / scale
    return Classifier(bias=float(weights[0] - made @ mean), weights=made.tolist())
