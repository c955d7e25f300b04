"""One server of the embedded model for all tests that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, "--max-num-seqs", "16", "--kv-cache-memory", "64MiB") as running:
        yield running
