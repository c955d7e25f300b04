"""Checkpoints in floats, which tests quantise."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.weights import reads
from tests.weights.quantised.writers import write_floats

Source = Callable[..., Path]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """source(moe=, intermediate=) gives a checkpoint in floats, written once: do not change it."""
    written: dict[tuple[bool, int], Path] = {}

    def folder(*, moe: bool = False, intermediate: int = 192) -> Path:
        if (moe, intermediate) not in written:
            target = written[moe, intermediate] = tmp_path_factory.mktemp("floats")
            write_floats(target, moe=moe, intermediate=intermediate)
        return written[moe, intermediate]

    return folder


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads begin within a word of zero points."""
    monkeypatch.setattr(reads, "READ_BYTES", 1000)
