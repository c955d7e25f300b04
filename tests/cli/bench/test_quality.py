"""`penstock bench quality`: the perplexity equals that of transformers, and mistakes are one line."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from penstock.weights.packaged import embedded_model
from tests.cli.conftest import RunCommand

MODEL = str(embedded_model())
SMALL = ("--threads", "1", "--kv-cache-memory", "32MiB")


def reference_nats(windows: list[list[int]]) -> list[float]:
    """The mean of -log p of each window's tokens but the first, by transformers in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    means = []
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            means.append(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:]).item())
    return means


def measured(run_command: RunCommand, file: Path, *arguments: str) -> dict[str, Any]:
    done = run_command("bench", "quality", MODEL, *arguments, "--json", str(file), *SMALL)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    for row in result["results"]:
        assert f"{row['perplexity']:,.3f}" in done.stdout
    return result


def test_perplexity_is_that_of_transformers(run_command: RunCommand, tmp_path: Path) -> None:
    text, ids = tmp_path / "text.txt", tmp_path / "ids.json"
    text.write_text(
        "def read(path: str) -> str:\n    with open(path, encoding='utf-8') as file:\n\tünïcödé = '字'\n" * 30
    )
    flags = ("--windows", "3", "--window-tokens", "150", "--dtype", "float32", "--tokens-out", str(ids))
    result = measured(run_command, tmp_path / "out.json", str(text), *flags)
    windows = json.loads(ids.read_text())
    assert [len(window) for window in windows] == [150, 150, 150]
    [row] = result["results"]
    expected = reference_nats(windows)
    assert row["windows"] == pytest.approx(expected, abs=1e-4)
    assert row["perplexity"] == pytest.approx(math.exp(sum(expected) / 3), rel=1e-3)
    assert (row["tokens"], result["window_tokens"], row["change_percent"]) == (447, 150, None)


def test_a_quantised_model_is_compared_with_the_dense_one(run_command: RunCommand, tmp_path: Path) -> None:
    ids, file = str(tmp_path / "ids.json"), tmp_path / "out.json"
    flags = ("--quantization", "int4", "--quantization-group", "128", "--kv-cache-dtype", "int8")
    dense, int4 = measured(run_command, file, "--windows", "4", "--tokens-out", ids, *flags)["results"]
    assert (dense["quantization"], dense["kv_cache"]) == ("none", "bfloat16")
    assert (int4["quantization"], int4["kv_cache"]) == ("int4", "int8")
    assert int4["weights_bytes"] < 0.5 * dense["weights_bytes"]
    assert int4["perplexity"] > dense["perplexity"]
    assert int4["change_percent"] == pytest.approx(100 * (int4["perplexity"] / dense["perplexity"] - 1), abs=0.01)
    changes = [ours - theirs for ours, theirs in zip(int4["windows"], dense["windows"], strict=True)]
    margin = (100 + int4["change_percent"]) * 1.96 * statistics.stdev(changes) / 2  # of four windows
    assert int4["change_margin"] == pytest.approx(margin, abs=0.01)
    assert dense["bits_per_byte"] < int4["bits_per_byte"]

    # The same ids give the same figure to the last digit, with and without the other run.
    [alone] = measured(run_command, file, "--tokens-in", ids, "--no-dense", *flags)["results"]
    assert (alone["windows"], alone["change_percent"]) == (int4["windows"], None)


def test_a_window_is_scored_whole_though_its_prefix_is_cached(run_command: RunCommand, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[*range(100, 180)]] * 7 + [[*range(100, 132)]]))
    [row] = measured(run_command, tmp_path / "out.json", "--tokens-in", str(ids))["results"]
    assert row["tokens"] == 7 * 79 + 31
    assert len(set(row["windows"][:7])) == 1
    [row] = measured(run_command, tmp_path / "out.json", "--tokens-in", str(ids), "--windows", "2")["results"]
    assert row["tokens"] == 2 * 79


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (MODEL, "--window-tokens", "4096"),
            ("--window-tokens 4096 takes 4096", "the model allows 2048", "at most 2048"),
        ),
        ((MODEL, "--max-model-len", "100"), ("--window-tokens 512", "--max-model-len", "is 100")),
        ((MODEL, "short.txt"), ("short.txt has", "512", "longer text", "--window-tokens")),
        ((MODEL, "empty.txt"), ("empty.txt has 0 tokens",)),
        ((MODEL, "--windows", "99999"), ("the default text has", "--windows 99999", "51199488")),
        ((MODEL, "missing.txt"), ("TEXT missing.txt", "no such file")),
        ((MODEL, "."), ("TEXT .", "directory")),
        ((MODEL, "binary"), ("TEXT binary is not UTF-8 text", "byte 3")),
        ((MODEL, "--tokens-in", "missing.json"), ("--tokens-in 'missing.json' cannot be read", "no such file")),
        ((MODEL, "--tokens-in", "short.txt"), ("--tokens-in short.txt is not a JSON list of lists",)),
        ((MODEL, "--tokens-in", "none.json"), ("none.json has no windows",)),
        ((MODEL, "--tokens-in", "single.json"), ("window 1 has 1 token", "2 or more")),
        ((MODEL, "--tokens-in", "negative.json"), ("window 0 has token id -1",)),
        ((MODEL, "--tokens-in", "large.json"), ("token id 8192", "0 to 8191")),
        ((MODEL, "--tokens-in", "long.json"), ("--tokens-in long.json takes 3000", "at most 2048")),
        (
            (MODEL, "--tokens-in", "large.json", "--window-tokens", "8"),
            ("--window-tokens 8", "--tokens-in", "leave one out"),
        ),
        ((MODEL, "short.txt", "--tokens-in", "large.json"), ("TEXT short.txt", "--tokens-in", "leave one out")),
        ((MODEL, "--tokens-out", "no-such-folder/ids.json"), ("--tokens-out", "no-such-folder")),
        ((MODEL, "--json", "no-such-folder/out.json"), ("--json", "no-such-folder")),
    ],
)
def test_a_mistake_is_one_clear_line(
    run_command: RunCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("short.txt", "Too little."),
        ("empty.txt", ""),
        ("none.json", "[]"),
        ("single.json", "[[5, 6], [7]]"),
        ("negative.json", "[[5, -1]]"),
        ("large.json", "[[5, 8192]]"),
        ("long.json", json.dumps([[5] * 3000])),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    done = run_command("bench", "quality", *arguments)
    assert done.returncode == 2
    *progress, line = done.stderr.splitlines()  # a slow machine says what it does, once a second
    assert line.startswith("penstock: ") and not any(each.startswith("penstock: ") for each in progress), done.stderr
    for word in words:
        assert word in line
