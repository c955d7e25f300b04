"""Servers of real models for clients that we did not write: SmolLM2, a gateway to it, and MiniLM, which embeds."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.frontend.providers.file import OPTIONAL
from tests.e2e.server import Server, serving
from tests.smollm2 import smollm2


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("serve") / "log"
    flags = ("--max-num-seqs", "8", "--kv-cache-memory", "256MiB", "--served-model-name", "smollm2")
    with serving(log, *flags, model=str(smollm2())) as running:
        yield running


@pytest.fixture(scope="package")
def gateway(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a model, whose provider is `server`."""
    folder = tmp_path_factory.mktemp("gateway")
    with serving(folder / "log", *behind(server, folder), model=None) as running:
        yield running


def behind(server: Server, folder: Path) -> tuple[str, ...]:
    """The flags of a gateway to a server that we made."""
    entry = {"url": f"{server.url}/v1", "private": True, "accepts": OPTIONAL, "models": {"smollm2": {}}}
    file = folder / "providers.yaml"
    file.write_text(json.dumps({"providers": {"behind": entry}}))
    return "--providers", str(file)


@pytest.fixture(scope="package")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("embedder") / "log", model="all-minilm-l6-v2") as running:
        yield running
