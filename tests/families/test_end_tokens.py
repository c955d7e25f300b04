"""The tokens that end an answer are those that any file of the model names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.families import UnsupportedModel, load_end_tokens, load_spec
from tests.families.configurations import LLAMA

LISTED = {"added_tokens": [{"id": 0, "content": "<|endoftext|>"}, {"id": 7, "content": "<|im_end|>"}], "model": {}}
DECODER = {"0": {"content": "<|endoftext|>"}, "7": {"content": "<|im_end|>", "special": True}}
TURN = {"eos_token": "<|im_end|>"}


def write(folder: Path, **files: Mapping[str, Any]) -> Path:
    """A model whose config.json names token 2."""
    for name, content in {"config": LLAMA, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2,)),
        ({"tokenizer_config": TURN, "tokenizer": LISTED}, (2, 7)),
        ({"tokenizer_config": TURN | {"added_tokens_decoder": DECODER}}, (2, 7)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}, "tokenizer": LISTED}, (2, 7)),
        ({"special_tokens_map": TURN, "tokenizer": LISTED}, (2, 7)),
        ({"tokenizer_config": TURN, "special_tokens_map": {"eos_token": "<|endoftext|>"}, "tokenizer": LISTED}, (2, 7)),
        ({"tokenizer_config": TURN, "tokenizer": LISTED, "generation_config": {"eos_token_id": 5}}, (5, 2, 7)),
        ({"tokenizer_config": TURN, "tokenizer": LISTED, "generation_config": {"eos_token_id": [7]}}, (7, 2)),
        # no id: the text is none of the special tokens, or its id is beyond the model's vocabulary
        ({"tokenizer_config": {"eos_token": "<|none|>"}, "tokenizer": LISTED}, (2,)),
        ({"tokenizer_config": TURN, "tokenizer": {"added_tokens": [{"id": 10**6, "content": "<|im_end|>"}]}}, (2,)),
        ({"tokenizer_config": {"eos_token": None}, "tokenizer": LISTED}, (2,)),
    ],
)
def test_the_files_are_united(tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert load_spec(write(tmp_path, **files)).eos_token_ids == expected


def test_each_token_has_its_text_and_its_files(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config=TURN, tokenizer=LISTED, generation_config={"eos_token_id": [7]})
    assert load_end_tokens(tmp_path) == [
        (7, "<|im_end|>", ("generation_config.json", "tokenizer_config.json")),
        (2, "", ("config.json",)),
    ]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"tokenizer_config\.json is not valid JSON"):
        load_spec(tmp_path)


def test_infinity_is_a_number_in_every_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={**LLAMA, "time_step_limit": [0.0, float("inf")]},
        generation_config={"eos_token_id": 5, "x": float("nan")},
        tokenizer_config={**TURN, "model_max_length": float("inf")},
        tokenizer=LISTED,
    )
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert load_spec(tmp_path).eos_token_ids == (5, 2, 7)
