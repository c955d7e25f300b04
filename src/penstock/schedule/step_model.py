"""Estimates the time of a step from the steps so far.

Times are differences of the scheduler's arguments `now`, so a replay of the events gives the same estimates.
"""

import math
from collections.abc import Sequence as Items
from typing import NamedTuple

from penstock.schedule.step import StepBuilder

MEMORY = 0.95  # each new measurement multiplies the weight of the older ones of its kind by this
OUTLIER = 3.0  # times the expected time: a longer step counts as this
LEAST_MEASURED = 3  # steps with prompts, before which nothing is known
FIRST_CHUNK = 32  # tokens of prompts in a step whose time is not known yet
GROWTH = 2.0  # times the largest recent chunk: the time of a larger one would be a guess
SPREAD = (1.05, 2.0)  # limits of StepModel.spread
SPREAD_SHARE = 0.9  # of steps with prompts that take less than `spread` times the expected time
SPREAD_PACE = 0.05  # by which a step moves it
LEAST_CHUNK = 16  # tokens of prompts in a step, so that a prompt advances with any target


class StepSize(NamedTuple):
    """The numbers on which the time of a step depends."""

    decodes: int = 0  # sequences that decode
    tokens: int = 0  # of prompts
    pairs: float = 0.0  # for each of these tokens, the tokens that it attends to

    @classmethod
    def of(cls, step: StepBuilder) -> "StepSize":
        if step.computed == len(step.work):
            return cls(len(step.work))
        decodes, tokens, pairs = 0, 0, 0.0
        for sequence, work in zip(step.sequences, step.work, strict=True):
            count = work.count
            if count - work.drafts == 1 and work.sample:
                decodes += count
            else:
                tokens += count
                pairs += count * (sequence.planned - count / 2)
        return cls(decodes, tokens, pairs)


class StepModel:
    """seconds = a + b decodes + c tokens + d pairs, by least squares over recent steps, with no negative factor.

    Steps with and without prompts have separate sums: steps without prompts do not reduce the weight of those with.
    """

    def __init__(self) -> None:
        self._plain, self._mixed = _WeightedSums(), _WeightedSums()
        self._factors: tuple[float, ...] | None = None
        self.spread = 1.2  # times the expected time: what most steps with prompts take less than
        self._largest = 0.0  # tokens of prompts in a step, of late

    def note(self, size: StepSize, seconds: float) -> None:
        sums = self._mixed if size.tokens else self._plain
        if sums.count > LEAST_MEASURED and (expected := self.seconds(size)):
            if size.tokens:
                longer = seconds > self.spread * expected
                self.spread += SPREAD_PACE * (SPREAD_SHARE if longer else SPREAD_SHARE - 1)
                self.spread = min(max(self.spread, SPREAD[0]), SPREAD[1])
            seconds = min(seconds, OUTLIER * expected)
        sums.add(_features(size), seconds)
        self._factors = None
        if size.tokens:
            self._largest = max(self._largest * MEMORY, size.tokens)

    @property
    def knows_prompts(self) -> bool:
        return self._mixed.count >= LEAST_MEASURED

    def seconds(self, size: StepSize) -> float:
        """The expected time of a step. 0 while nothing has been measured."""
        return sum(factor * value for factor, value in zip(self._solved(), _features(size), strict=True))

    def prompt_tokens(self, decodes: int, context: int, target: float) -> int:
        """Tokens of a prompt, of which `context` are computed, that fit a step of `target` seconds beside `decodes`."""
        if not self.knows_prompts:
            return FIRST_CHUNK
        room = target - self.seconds(StepSize(decodes))
        most = int(GROWTH * max(self._largest, LEAST_CHUNK))
        if room <= 0:
            return LEAST_CHUNK
        _, _, token, pair = (factor / scale for factor, scale in zip(self._solved(), _SCALES, strict=True))
        # pair / 2 n^2 + (token + pair context) n = room
        slope = token + pair * context
        below = slope + math.sqrt(slope * slope + 2 * pair * room)
        return max(LEAST_CHUNK, min(most, int(2 * room / below) if below else most))

    def _solved(self) -> tuple[float, ...]:
        if self._factors is None:
            self._factors = _least_squares(self._plain, self._mixed)
        return self._factors


_SCALES = (1.0, 32.0, 256.0, 65536.0)  # so that features are of like size
_PLACES = range(len(_SCALES))


def _features(size: StepSize) -> tuple[float, ...]:
    return (1.0, size.decodes / _SCALES[1], size.tokens / _SCALES[2], size.pairs / _SCALES[3])


class _WeightedSums:
    """Sums over measurements, older ones with less weight."""

    def __init__(self) -> None:
        self.count = 0
        self.products = [[0.0] * len(_SCALES) for _ in _PLACES]
        self.values = [0.0] * len(_SCALES)

    def add(self, features: Items[float], value: float) -> None:
        self.count += 1
        for i in _PLACES:
            row, x = self.products[i], features[i]
            for j in _PLACES:
                row[j] = row[j] * MEMORY + x * features[j]
            self.values[i] = self.values[i] * MEMORY + x * value


def _least_squares(plain: _WeightedSums, mixed: _WeightedSums) -> tuple[float, ...]:
    """The factors with the least sum of squares, of those without a negative one that this finds: it leaves out the
    most negative factor until there is none."""
    products = [[plain.products[i][j] + mixed.products[i][j] for j in _PLACES] for i in _PLACES]
    values = [plain.values[i] + mixed.values[i] for i in _PLACES]
    ridge = 1e-6 * max(products[i][i] for i in _PLACES)
    kept = [i for i in _PLACES if products[i][i] > 0]
    while kept:
        found = _solve([[products[i][j] + ridge * (i == j) for j in kept] for i in kept], [values[i] for i in kept])
        least = min(range(len(kept)), key=found.__getitem__)
        if found[least] >= 0:
            factors = dict(zip(kept, found, strict=True))
            return tuple(factors.get(i, 0.0) for i in _PLACES)
        del kept[least]
    return (0.0,) * len(_SCALES)


def _solve(matrix: list[list[float]], values: list[float]) -> list[float]:
    """Gaussian elimination of a positive definite system."""
    size = len(values)
    for i in range(size):
        for row in range(i + 1, size):
            share = matrix[row][i] / matrix[i][i]
            for column in range(i, size):
                matrix[row][column] -= share * matrix[i][column]
            values[row] -= share * values[i]
    for i in reversed(range(size)):
        values[i] = (values[i] - sum(matrix[i][j] * values[j] for j in range(i + 1, size))) / matrix[i][i]
    return values
