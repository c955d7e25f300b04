"""Servers of real models for clients that we did not write: SmolLM2, and MiniLM, which embeds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving
from tests.smollm2 import smollm2


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("serve") / "log"
    flags = ("--max-num-seqs", "8", "--kv-cache-memory", "256MiB", "--served-model-name", "smollm2")
    with serving(log, *flags, model=str(smollm2())) as running:
        yield running


@pytest.fixture(scope="package")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("embedder") / "log", model="all-minilm-l6-v2") as running:
        yield running
