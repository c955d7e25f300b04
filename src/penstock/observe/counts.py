"""The sum of what several processes have counted."""

from typing import Any

Counts = dict[str, Any]  # numbers, lists of numbers, or Counts, by name


def add(one: Counts, other: Counts) -> Counts:
    """Returns the sums of what has the same name; what only one of them has stays."""
    return {
        name: _sum(one[name], other[name]) if name in one and name in other else one.get(name, other.get(name))
        for name in {**one, **other}
    }


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return add(one, other)
    if isinstance(one, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    return one + other
