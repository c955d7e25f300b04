"""Windows of token ids, and the figures of a score."""

import json
import math
from pathlib import Path

import pytest

from penstock.bench.quality import (
    Score,
    cut_windows,
    english,
    figures,
    read_windows,
    scored_bytes,
    windows_json,
)
from penstock.text import Tokenizer
from penstock.weights.packaged import embedded_model
from tests.text.tokenizers_on_disk import llama3

TEXT = "The quick brown fox jumps over the lazy dog. Größe, naïve café, 你好! " * 20


def test_windows_are_the_text_cut_in_equal_pieces() -> None:
    tokenizer = Tokenizer.load(embedded_model())
    ids = tokenizer.encode(TEXT)
    windows = cut_windows(tokenizer, TEXT, 64, 1000)
    assert windows == [ids[i * 64 : i * 64 + 64] for i in range(len(ids) // 64)] and len(windows) > 5
    assert cut_windows(tokenizer, TEXT, 64, 2) == windows[:2]
    assert cut_windows(tokenizer, TEXT, len(ids), 9) == [ids]
    assert cut_windows(tokenizer, TEXT, len(ids) + 1, 9) == []


def test_every_window_begins_with_bos_if_prompts_do(tmp_path: Path) -> None:
    llama3(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    bos, *ids = tokenizer.encode(TEXT)
    assert bos == tokenizer.bos_token_id not in ids
    windows = cut_windows(tokenizer, TEXT, 33, 1000)
    assert windows == [[bos, *ids[i * 32 : i * 32 + 32]] for i in range(len(ids) // 32)] and len(windows) > 5


def test_scored_bytes_are_those_of_the_text() -> None:
    tokenizer = Tokenizer.load(embedded_model())
    ids = tokenizer.encode(TEXT)
    assert scored_bytes(tokenizer, [ids, ids]) == 2 * (len(TEXT.encode()) - len(tokenizer.token_bytes(ids[0])))


def test_windows_survive_a_file_that_other_engines_read(tmp_path: Path) -> None:
    file, windows = tmp_path / "ids.json", [[1, 2, 3], [70000, 5]]
    file.write_text(windows_json(windows))
    assert read_windows(str(file)) == windows == json.loads(file.read_text())


def test_the_default_text_is_english() -> None:
    text = english()
    assert len(text) > 300_000
    assert text.count(" the ") + text.count("\nthe ") > 2000


def test_perplexity_is_over_all_tokens_and_the_change_over_equal_windows() -> None:
    """Worked out by hand: windows of 1 and 3 tokens, with p = 1/2 and 1/4."""
    dense = Score((math.log(2), 3 * math.log(4)), (1, 3), 2.0)
    assert dense.perplexity == pytest.approx(2 ** (7 / 4))
    worse = Score((math.log(2) + 0.01, 3 * math.log(4) + 0.09), (1, 3), 2.0)
    assert worse.percent_over(dense) == pytest.approx(100 * (math.exp(0.1 / 4) - 1))
    deviation = math.sqrt(2) * 0.01  # of 0.01 and 0.03
    assert worse.margin_over(dense) == pytest.approx(196 * deviation / math.sqrt(2) * math.exp(0.1 / 4))
    row = figures(worse, dense, 7)
    assert row["bits_per_byte"] == pytest.approx((7 + 0.1 / math.log(2)) / 7, abs=1e-4)
    assert (row["tokens"], row["tokens_s"]) == (4, 2.0)


def test_a_broken_model_has_infinite_perplexity() -> None:
    sane, broken = Score((2.0,), (2,), 1.0), Score((4000.0,), (2,), 1.0)
    assert broken.perplexity == math.inf
    assert sane.margin_over(sane) is None
    two = Score((4000.0, 4000.0), (2, 2), 1.0)
    assert two.percent_over(Score((2.0, 2.0), (2, 2), 1.0)) > 1e300
    assert two.margin_over(Score((2.0, 2.0), (2, 2), 1.0)) == 0
