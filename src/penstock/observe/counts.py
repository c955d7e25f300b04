"""Adds up the counts of several processes."""

from typing import Any

Counts = dict[str, Any]  # name -> a number, a list of numbers, or Counts


def add(one: Counts, other: Counts) -> Counts:
    """Returns both, with the values of a common name added. Lists are added element by element."""
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
