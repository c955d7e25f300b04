from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from penstock.text import Tokenizer
from tests.text.tokenizers_on_disk import KINDS


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind -> folder with that tokenizer's files."""

    @cache
    def build(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        KINDS[kind](folder)
        return folder

    return build


@pytest.fixture(scope="session")
def tokenizer_of(folder_of: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    @cache
    def load(kind: str) -> Tokenizer:
        return Tokenizer.load(folder_of(kind))

    return load
