"""`penstock route fit | evaluate`."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.route.evaluate import outcomes
from penstock.cli.route.labels import Label, read_labels
from penstock.frontend.providers.difficulty import features, read_classifier
from tests.cli.conftest import RunCommand


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count: int) -> list[dict[str, Any]]:
    """Labels of code, which the small model completes, and of questions, which it does not."""
    drawn = random.Random(1)
    names = ("read", "write", "open", "close", "parse", "sort", "find", "count")
    made = []
    for number in range(count):
        name, easy = drawn.choice(names), number % 2
        text = (
            f"def {name}(self, x):\n    return x.{name}(" if easy else f"Who was the first to {name} a letter, and why?"
        )
        small = {"small": float(easy), "small_cost": 1.0, "logprob": -0.1 if easy else -2.0}
        made.append({"request": {"prompt": f"{text} {number}"}, **small, "large": 1.0, "large_cost": 10.0})
    return made


def test_fits_and_evaluates(run_command: RunCommand, tmp_path: Path) -> None:
    learnt, judged = write(tmp_path / "learnt.jsonl", rows(60)), write(tmp_path / "judged.jsonl", rows(40)[20:])
    out = str(tmp_path / "route.json")
    done = run_command("route", "fit", learnt, "--out", out)
    assert done.returncode == 0 and "60 labels, 30 with a small answer" in done.stdout
    assert "right for 9" in done.stdout and "left out; always one answer: 50.0%" in done.stdout
    made = read_classifier(out, "x")
    chances = [made.probability(features(label.request)) for label in read_labels(judged)]
    assert all((chance > 0.5) == bool(i % 2) for i, chance in enumerate(chances))
    table = run_command("route", "evaluate", judged, "--classifier", out).stdout.splitlines()
    assert table[0].split() == ["CHOICE", "LARGE", "COST", "QUALITY", "AT", "RANDOM"]
    assert table[1].split()[-4:] == ["0.0%", "1", "0.5000", "0.5000"]
    assert table[-1].split()[-4:] == ["100.0%", "10", "1.0000", "1.0000"]
    assert sum(line.startswith("probability:") for line in table) == 5


def test_a_cascade_pays_for_the_small_answers_that_it_refuses() -> None:
    labels = [
        Label(request={}, small=i >= 2, large=1.0, small_cost=1.0, large_cost=5.0, logprob=-4.0 + i) for i in range(4)
    ]
    small, *cascades, large = outcomes(labels, None)
    assert (small.cost, small.quality, large.cost, large.quality) == (1.0, 0.5, 5.0, 1.0)
    half = next(each for each in cascades if each.way == "logprob: -2")
    assert (half.large, half.cost, half.quality) == (0.5, 0.5 * 1 + 0.5 * 6, 1.0)
    assert half.mixed == pytest.approx(0.5 + 0.5 * (3.5 - 1) / 4)  # at random, the same cost gives less
    classified = next(each for each in outcomes(labels, [0.1, 0.2, 0.8, 0.9]) if each.way == "probability: 0.8")
    assert (classified.large, classified.cost, classified.quality) == (0.5, 3.0, 1.0)


def test_mistakes_in_labels(tmp_path: Path) -> None:
    good = rows(2)
    path = write(tmp_path / "a.jsonl", [good[0], {**good[1], "small": "good"}])
    with pytest.raises(ValueError, match=r"line 2: Expected `float`, got `str` - at `\$\.small`"):
        read_labels(path)
    with pytest.raises(ValueError, match=r"line 1: .*; see docs/gateway.md"):
        read_labels(write(tmp_path / "b.jsonl", [{"request": {}, "smal": 1.0}]))
    with pytest.raises(ValueError, match="is empty; give at least one label"):
        read_labels(write(tmp_path / "c.jsonl", []))
