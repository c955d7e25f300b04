"""Starts rank processes that the tests of a module share. Each has imported torch before the first test."""

from collections.abc import Iterator

import pytest

from tests.runtime.mesh.ranks import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(4) as ready:
        yield ready
