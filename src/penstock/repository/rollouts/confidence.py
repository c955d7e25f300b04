"""An interval for a mean that holds however often one looks at it.

A test of fixed size gives false alarms if it is looked at after every sample. This interval may be looked at at any
time: the chance that it ever leaves out the mean is at most alpha. It is the predictable plug-in empirical-Bernstein
confidence sequence of Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2023),
theorem 2. It needs no assumption on the values but their bounds, and is narrower if they vary less.
"""

import math

import msgspec

_MOST_WEIGHT = 0.5  # of a value. Below 1, as the paper demands; larger ones make early intervals narrower


class ConfidenceSequence(msgspec.Struct):
    """Of the mean of values in [-1, 1]. Takes constant memory, and can be stored."""

    alpha: float  # the chance that the interval ever leaves out the mean
    count: int = 0
    total: float = 0.0  # of the values, scaled to [0, 1]
    squares: float = 0.0  # of their distances from the mean so far
    weights: float = 0.0
    weighted: float = 0.0
    variation: float = 0.0

    def add(self, value: float) -> None:
        """Counts a value. Raises ValueError if it is not in [-1, 1]."""
        if not -1 <= value <= 1:
            raise ValueError(f"a difference is {value}; it must be in [-1, 1]")
        scaled = (value + 1) / 2
        self.count += 1
        # The weight may depend on earlier values only.
        variance = (0.25 + self.squares) / self.count
        weight = math.sqrt(2 * math.log(2 / self.alpha) / (variance * self.count * math.log1p(self.count)))
        weight = min(weight, _MOST_WEIGHT)
        mean = (0.5 + self.total) / self.count
        self.weights += weight
        self.weighted += weight * scaled
        self.variation += (scaled - mean) ** 2 * (-math.log1p(-weight) - weight)
        self.total += scaled
        self.squares += (scaled - (0.5 + self.total) / (self.count + 1)) ** 2

    @property
    def mean(self) -> float:
        """Of the values so far; 0 without values."""
        return 2 * self.total / self.count - 1 if self.count else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The lower and the upper bound; (-1, 1) without values."""
        if not self.count:
            return -1.0, 1.0
        center = self.weighted / self.weights
        margin = (math.log(2 / self.alpha) + self.variation) / self.weights
        return max(2 * (center - margin) - 1, -1.0), min(2 * (center + margin) - 1, 1.0)
