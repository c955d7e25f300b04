"""`penstock detect`, on texts that the default model's tokenizer reads."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.runtime.sampling import noise
from penstock.runtime.sampling.watermark import CONTEXT, GREEN_BELOW, Scheme, Watermark
from penstock.text import Tokenizer
from tests.cli.conftest import RunCommand
from tests.smollm2 import smollm2

SECRET = "a secret of these tests"
PLAIN = "The keeper climbed the stairs. Nobody had lit the lamp since his father died, and the ships kept away."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(smollm2())


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WATERMARK_KEY", SECRET)


def marked(tokenizer: Tokenizer, scheme: Scheme, count: int = 60) -> str:
    """Words that are all lucky. Each is one token, whatever is beside it."""
    mark, source = Watermark.of(scheme, SECRET), np.random.default_rng(4)
    words = [i for i in range(1000, 20_000) if tokenizer.token(i).startswith(" ") and tokenizer.token(i)[1:].isalpha()]
    ids = list(map(int, source.choice(words, CONTEXT[scheme])))
    while len(ids) < count:
        some = source.choice(words, 64)
        hashes = noise.hash_tokens(some, mark.keys(np.array([ids[-CONTEXT[scheme] :]])))[0]
        ids.append(int(some[hashes.argmin()]))
        assert hashes.min() < GREEN_BELOW
    return tokenizer.decode(ids)


@pytest.mark.parametrize("scheme", ["green-list", "gumbel"])
def test_a_marked_text(run_command: RunCommand, tokenizer: Tokenizer, scheme: Scheme, tmp_path: Path) -> None:
    text, file, figures = marked(tokenizer, scheme), tmp_path / "text.txt", tmp_path / "figures.json"
    file.write_text(text)
    done = run_command("detect", str(file), "--json", str(figures))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("The text has the watermark of this key.\n")
    evidence = json.loads(figures.read_text())["schemes"]
    other = next(name for name in CONTEXT if name != scheme)
    assert evidence[scheme]["p"] < 1e-6 < 0.001 < evidence[other]["p"]
    assert f"p = {evidence[scheme]['p']:.2g}" in done.stdout
    alone = run_command("detect", text, "--watermark", other)
    assert alone.returncode == 1 and scheme not in alone.stdout


def test_other_texts_and_other_keys(
    run_command: RunCommand, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = marked(tokenizer, "gumbel")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PLAIN.encode())))
    done = run_command("detect", "-")
    assert done.returncode == 1 and "There is no sign" in done.stdout
    monkeypatch.setenv("PENSTOCK_WATERMARK_KEY", SECRET[::-1])
    assert run_command("detect", text).returncode == 1
    assert "too short" in run_command("detect", "one").stdout


def test_what_cannot_be_read(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"a" * (4 << 20) + b"b")
    for source, words in (
        (str(tmp_path), "cannot be read"),
        (str(tmp_path / "bytes"), "UTF-8"),
        (str(tmp_path / "large"), "4194304 bytes"),
        ("  ", "has no text"),
    ):
        done = run_command("detect", source)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    monkeypatch.delenv("PENSTOCK_WATERMARK_KEY")
    assert "set PENSTOCK_WATERMARK_KEY" in run_command("detect", "text").stderr
