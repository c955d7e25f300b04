"""Distributions of lengths in tokens."""

import math
import random

import msgspec

MAX_LENGTH = 10**6  # tokens of a prompt or an output


class _Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Uniform(_Distribution, frozen=True, tag="uniform"):
    """Any whole number from low to high is equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MAX_LENGTH:
            raise ValueError(f"low {self.low} and high {self.high}: give 1 to {MAX_LENGTH}, low not above high")


class LogNormal(_Distribution, frozen=True, tag="lognormal"):
    """Many short ones and a long tail, as in public traces of chats. `sigma` is that of the logarithm."""

    median: float
    sigma: float
    most: int
    least: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.least <= self.most <= MAX_LENGTH and self.median >= 1 and 0 <= self.sigma <= 4):
            raise ValueError(
                f"median {self.median}, sigma {self.sigma}, least {self.least}, most {self.most}: give a median of 1 "
                f"or more, a sigma from 0 to 4, and 1 <= least <= most <= {MAX_LENGTH}"
            )


class OneOf(_Distribution, frozen=True, tag="choice"):
    """One of `values`. With `weights`, some are more likely."""

    values: tuple[int, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.values or not all(1 <= value <= MAX_LENGTH for value in self.values):
            raise ValueError(f"values {list(self.values)}: give at least one, each from 1 to {MAX_LENGTH}")
        if self.weights and (len(self.weights) != len(self.values) or min(self.weights) < 0 or not sum(self.weights)):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.values)} values: give one for each, not below 0"
            )


Length = int | Uniform | LogNormal | OneOf


def check_length(name: str, length: Length) -> None:
    """Raises ValueError for a fixed length out of range."""
    if isinstance(length, int) and not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"{name} {length}: give 1 to {MAX_LENGTH} tokens")


def draw(length: Length, chance: random.Random) -> int:
    """Returns a number of tokens."""
    match length:
        case Uniform(low, high):
            return chance.randint(low, high)
        case LogNormal(median, sigma, most, least):
            return min(max(round(chance.lognormvariate(math.log(median), sigma)), least), most)
        case OneOf(values, weights):
            return chance.choices(values, weights or None)[0]
    return length


def mean(length: Length) -> float:
    """Returns the expected number of tokens; of LogNormal the mean without its limits."""
    match length:
        case Uniform(low, high):
            return (low + high) / 2
        case LogNormal(median, sigma, most):
            return min(median * math.exp(sigma**2 / 2), float(most))
        case OneOf(values, weights):
            shares = weights or (1.0,) * len(values)
            return sum(value * share for value, share in zip(values, shares, strict=True)) / sum(shares)
    return float(length)
