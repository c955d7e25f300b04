"""Which cases of a test `make test` runs. `make test-all` runs the others as well."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Cases of a parametrised test, tuples if they have several values. Those that are not among the `few` are rare."""
    return [case if case in few else rare(*(case if isinstance(case, tuple) else (case,))) for case in cases]


def rare(*values: Any) -> Any:
    """A case that shows what another one shows as well."""
    return pytest.param(*values, marks=pytest.mark.rare)
