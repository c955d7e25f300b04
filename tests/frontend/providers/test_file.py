"""Mistakes in a providers file, each with an error that names the place."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.providers.difficulty import BUCKETS, MEASURES, read_classifier
from penstock.frontend.providers.file import check_names, is_private, read_providers

GOOD: dict[str, Any] = {"key_env": "", "models": {"m": {"input": 1, "output": 2}}}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"url": "http://api.example.com/v1"}, "at providers.p.url: it is 'http://api.example.com/v1': plain HTTP"),
        ({"url": "https://10.0.0.1/v1"}, "or a private address"),
        ({"url": "https://[::1]/v1"}, "or a private address"),
        ({"url": "https://localhost/v1"}, "or a private address"),
        ({"url": "https://user:pw@example.com/v1"}, "without a key or a query"),
        ({"url": "ftp://example.com"}, "give a URL such as"),
        ({"key_env": "PENSTOCK_TEST_NO_SUCH_KEY"}, "at providers.p: the environment variable PENSTOCK_TEST_NO_SUCH"),
        ({"key_file": "/nonexistent"}, "the file /nonexistent cannot be read"),
        ({"key_file": "/dev/null"}, "the file /dev/null has no key"),
        ({"key_file": "a", "key_env": "B"}, "key_file is set, too"),
        ({"key": "sk-1"}, "at providers.p: there is no field 'key'"),
        ({"kind": "gemini"}, "at providers.p.kind: invalid enum value 'gemini'"),
        ({"accepts": ["images"]}, "there is no 'images'"),
        ({"retries": 11}, "it is 11; give a number from 0 to 10"),
        ({"timeout": 0}, "above 0, up to 86400"),
        ({"models": {"m": {"input": -1}}}, "at providers.p.models.m: a price is below 0"),
        ({"models": {"m": {"max_output": 10, "context": 5}}}, "max_output is 10 and context 5"),
    ],
)
def test_mistakes(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    file = tmp_path / "providers.yaml"
    file.write_text(json.dumps({"providers": {"p": {**GOOD, **entry}}}))
    with pytest.raises(ValueError) as error:
        read_providers(file)
    assert str(error.value).startswith(f"--providers {file}, at ") and words in str(error.value)


def test_a_fallback_that_nothing_has(tmp_path: Path) -> None:
    file = tmp_path / "providers.yaml"
    file.write_text(json.dumps({"providers": {"p": GOOD}, "fallbacks": {"m": ["n"]}}))
    with pytest.raises(ValueError, match=r"at fallbacks\.m: there is no model 'n'"):
        check_names(read_providers(file), ["m"], "x")


def test_a_route_with_the_name_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "providers.yaml"
    file.write_text(json.dumps({"routes": {"m": {"small": "a", "large": "m", "logprob": -1}}}))
    with pytest.raises(ValueError, match=r"at routes\.m: a model has this name"):
        check_names(read_providers(file), ["a", "m"], "x")


def test_a_classifier_of_another_size(tmp_path: Path) -> None:
    file = tmp_path / "route.json"
    for weights in ([1.0], [float("1e400")] * (MEASURES + BUCKETS)):
        file.write_text(json.dumps({"bias": 0.0, "weights": weights}))
        with pytest.raises(ValueError, match=r"finite weights|no classifier"):
            read_classifier(str(file), "x")


def test_private_addresses() -> None:
    private = (
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "192.168.0.1",
        "::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "localhost",
        "0.0.0.0",
    )
    assert all(map(is_private, private)) and not any(map(is_private, ("1.1.1.1", "api.openai.com", "2606:4700::1")))
