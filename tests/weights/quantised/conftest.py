"""Checkpoints in floats, which tests quantise."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.weights import reads
from tests.weights.quantised.writers import COMMON, write_floats

Source = Callable[..., Path]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """source(moe=, intermediate=, hidden=) gives a checkpoint in floats, written once: do not change it."""
    written: dict[tuple[bool, int, int], Path] = {}

    def folder(*, moe: bool = False, intermediate: int = 192, hidden: int = COMMON["hidden_size"]) -> Path:
        sizes = (moe, intermediate, hidden)
        if sizes not in written:
            target = written[sizes] = tmp_path_factory.mktemp("floats")
            write_floats(target, moe=moe, intermediate=intermediate, hidden_size=hidden, head_dim=hidden // 2)
        return written[sizes]

    return folder


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads begin within a word of zero points."""
    monkeypatch.setattr(reads, "READ_BYTES", 1000)
