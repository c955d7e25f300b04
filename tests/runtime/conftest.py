"""Processes for ranks, which the tests of a module share: each has imported torch by then."""

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(4) as ready:
        yield ready
