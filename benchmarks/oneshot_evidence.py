"""Records what the judges of rollouts find of faults in one-shot models (docs/rollouts.md).

A server has a classifier and a ranker, fitted to half of the data; the same models fitted to the other half, which are
no worse; and each with a fault. The classifier with the fault is too sure of itself, though its classes are the same.
The other ranker has an NDCG@10 that is 0.02 lower. The differences that the judges find for each request are written
to a file, from which tests/repository/test_recorded_rollouts.py draws the evidence of many rollouts.

    python benchmarks/oneshot_evidence.py --json tests/assets/oneshot_evidence.json
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from many_served import server
from results import parser, save

from penstock.messages.arrays import tensor_of
from penstock.repository.rollouts.judging import WITHOUT_LABELS, LabelledJudges, Pair, VersionOutcome
from tests.repository.onnx_files import FLOAT, model, node, put, weight

REQUESTS, FEATURES, CLASSES, ITEMS, LEVELS = 300, 12, 3, 20, 4
SHARPNESS, NDCG_LOSS = 3.0, 0.02
NAMES = "old", "equal", "worse"


class Task(NamedTuple):
    """A model's requests, the label of each, and the weights of its versions, [features, outputs]."""

    judges: tuple[str, ...]
    inputs: Any  # [requests, rows, features]
    labels: list[Any]
    weights: list[Any]  # of NAMES
    nodes: list[bytes]
    columns: int


def fit(features: Any, targets: Any) -> Any:
    """The weights of the least squares, [features, columns]."""
    return np.linalg.lstsq(features, targets, rcond=None)[0]


def classifier(draw: np.random.Generator) -> Task:
    """Classes are drawn by the softmax of linear scores, and each version estimates these scores."""
    true = draw.normal(size=(FEATURES, CLASSES)) * 0.5
    fitted = []
    for _ in range(2):
        rows = draw.normal(size=(20_000, FEATURES))
        one_hot, found = np.eye(CLASSES)[classes(rows @ true, draw)], np.zeros((FEATURES, CLASSES))
        for _ in range(200):  # gradient descent of the log loss
            found += 2.0 * rows.T @ (one_hot - softmax(rows @ found)) / len(rows)
        fitted.append(found)
    inputs = draw.normal(size=(REQUESTS, 1, FEATURES))
    labels = classes(inputs[:, 0] @ true, draw).tolist()
    nodes = [node("MatMul", ["x", "w"], ["s"]), node("Softmax", ["s"], ["y"], axis=1)]
    return Task(("brier", "log_loss"), inputs, labels, [*fitted, SHARPNESS * fitted[0]], nodes, CLASSES)


def ranker(draw: np.random.Generator) -> Task:
    """Gains are levels of a linear score with noise, and each version estimates this score."""
    true, fitted = draw.normal(size=(FEATURES, 1)), []
    for _ in range(2):
        rows = draw.normal(size=(20_000, FEATURES))
        fitted.append(fit(rows, rows @ true + draw.normal(size=(len(rows), 1))))
    inputs = draw.normal(size=(REQUESTS, ITEMS, FEATURES))
    scores = (inputs @ true)[..., 0] + draw.normal(size=(REQUESTS, ITEMS))
    labels = np.clip(np.floor(scores / np.std(scores) + LEVELS / 2), 0, LEVELS - 1).astype(int).tolist()
    noise, low, high = draw.normal(size=true.shape), 0.0, 1.0
    for _ in range(30):  # how much noise lowers the NDCG so far
        middle = (low + high) / 2
        worse = fitted[0] + middle * noise
        lost = np.mean(
            [ndcg_loss(x @ worse, y) - ndcg_loss(x @ fitted[0], y) for x, y in zip(inputs, labels, strict=True)]
        )
        low, high = (low, middle) if lost > NDCG_LOSS else (middle, high)
    return Task(("ndcg",), inputs, labels, [*fitted, worse], [node("MatMul", ["x", "w"], ["y"])], 1)


def softmax(scores: Any) -> Any:
    found = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return found / found.sum(axis=-1, keepdims=True)


def classes(scores: Any, draw: np.random.Generator) -> Any:
    return (softmax(scores).cumsum(axis=-1) < draw.random((len(scores), 1))).sum(axis=-1).clip(0, CLASSES - 1)


def ndcg_loss(scores: Any, gains: list[int]) -> float:
    perfect = outcome(np.asarray(gains, dtype=float)[:, None])
    return LabelledJudges().difference("ndcg", Pair(perfect, outcome(scores)), gains) or 0.0


def outcome(outputs: Any) -> VersionOutcome:
    return VersionOutcome([tensor_of("y", "FP32", outputs.astype(np.float32))], False, 0.0)


def ask(http: httpx.Client, name: str, rows: Any) -> VersionOutcome:
    """What a model of the server answers. Raises httpx.HTTPStatusError."""
    tensor = {"name": "x", "datatype": "FP32", "shape": rows.shape, "data": rows.ravel().tolist()}
    answer = http.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]}).raise_for_status().json()["outputs"][0]
    return outcome(np.reshape(answer["data"], answer["shape"]))


def main() -> None:
    options, draw = parser(__doc__).parse_args(), np.random.default_rng(1)
    tasks = {"classifier": classifier(draw), "ranker": ranker(draw)}
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, task in tasks.items():
            for version, weights in zip(NAMES, task.weights, strict=True):
                inputs, outputs = ("x", FLOAT, ("n", FEATURES)), ("y", FLOAT, ("n", task.columns))
                made = model(task.nodes, [inputs], [outputs], [weight("w", weights.astype(np.float32))])
                put(Path(folder) / "models", f"{name}-{version}", made)
        with server(Path(folder), Path(folder) / "models") as (url, _), httpx.Client(base_url=url) as http:
            for name, task in tasks.items():
                for version in NAMES[1:]:
                    kind = found[f"{version} {name}"] = {
                        judge: [] for judge in ("errors", "disagreement", *task.judges)
                    }
                    for rows, label in zip(task.inputs, task.labels, strict=True):
                        pair = Pair(ask(http, f"{name}-old", rows), ask(http, f"{name}-{version}", rows))
                        for judge in ("errors", "disagreement"):
                            kind[judge].append(round(WITHOUT_LABELS[judge](pair) or 0.0, 4))
                        for judge in task.judges:
                            kind[judge].append(round(LabelledJudges().difference(judge, pair, label) or 0.0, 4))
    for name, judges in found.items():
        print(name, {judge: round(float(np.mean(values)), 4) for judge, values in judges.items()})
    save({"pairs": REQUESTS, "kinds": found}, options.json)


if __name__ == "__main__":
    main()
