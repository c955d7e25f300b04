"""Adds and subtracts the counts of several processes."""

from typing import Any

Counts = dict[str, Any]  # name -> a number, a list of numbers, or Counts


def add(one: Counts, other: Counts) -> Counts:
    """Returns both, with the values of a common name added. Lists are added element by element."""
    return {
        name: _sum(one[name], other[name]) if name in one and name in other else one.get(name, other.get(name))
        for name in {**one, **other}
    }


def subtract(one: Counts, other: Counts) -> Counts:
    """Returns `one` less `other`, which may lack names."""
    return {name: _difference(value, other[name]) if name in other else value for name, value in one.items()}


def _difference(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return subtract(one, other)
    if isinstance(one, list):
        return [a - b for a, b in zip(one, other, strict=True)]
    return one - other


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return add(one, other)
    if isinstance(one, list):
        return [a + b for a, b in zip(one, other, strict=True)]
    return one + other
