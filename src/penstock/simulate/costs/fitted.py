"""The time of a step, fitted to measured steps by weighted least squares without negative factors."""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.messages import Capacity
from penstock.schedule import SchedulerConfig, read_events, replay
from penstock.schedule.log import Applied, Event, Planned, Started, Submitted
from penstock.simulate.costs.counter import StepCounter
from penstock.simulate.costs.work import StepLoad

KNOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048)  # tokens at which the cost of one more changes
CONTINUES = 0.003  # seconds from a result to the next plan, below which the engine was not idle between
LEAST_STEPS = 50  # to fit to
ROUNDS = 4  # of the fit, with the expected times of the one before as weights


class MeasuredStep(msgspec.Struct, frozen=True):
    """A step and the seconds that it took."""

    work: StepLoad
    seconds: float
    ended: float = 0.0
    others: int = 0  # results that other engines of the machine had meanwhile


class FittedCost(msgspec.Struct, frozen=True):
    """seconds = factors · features. The features are a constant, the tokens beyond each knot, rows that sample, context
    that decodes read, and pairs and context of prompts."""

    factors: tuple[float, ...]
    stages: int = 1
    # Seconds for each result that another engine of the machine has during the step: its API process and its client
    # take them from a processor that computes.
    delay: float = 0.0

    def seconds(self, work: StepLoad) -> float:
        """See StepCostModel."""
        return sum([factor * feature for factor, feature in zip(self.factors, _features(work), strict=True)])


def _features(work: StepLoad) -> list[float]:
    decodes, context, prompt_tokens, pairs, prompt_context, sampled = work
    tokens = decodes + prompt_tokens
    beyond = [float(tokens - knot) if tokens > knot else 0.0 for knot in KNOTS]
    return [1.0, float(tokens), *beyond, float(sampled), float(context), float(pairs), float(prompt_context)]


def fit(steps: Sequence[MeasuredStep]) -> FittedCost:
    """Returns the model that fits best, with each step weighted by one over its time. So the times that it gives sum to
    the measured ones, and time that is lost at random, which any step may lose, goes to the constant: weighted by
    relative errors and then scaled, it made long prompts too slow. Raises ValueError for fewer than LEAST_STEPS steps.
    """
    if len(steps) < LEAST_STEPS:
        raise ValueError(f"{len(steps)} steps were measured: give a log with at least {LEAST_STEPS}")
    features = np.array([[*_features(step.work), float(step.others)] for step in steps])
    seconds = np.array([step.seconds for step in steps])
    expected = seconds
    for _ in range(ROUNDS):
        weights = 1.0 / np.sqrt(expected)
        factors = _nonnegative(features * weights[:, None], seconds * weights)
        expected = features @ factors
    *own, delay = factors.tolist()
    return FittedCost(tuple(own), delay=delay)


def _nonnegative(matrix: NDArray[Any], target: NDArray[Any]) -> NDArray[Any]:
    """Returns x >= 0 with the least |matrix x - target| (Lawson and Hanson, "Solving Least Squares Problems", 1974)."""
    count = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    x, passive = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-9:
            break
        passive[best] = True
        while True:
            solution = np.zeros(count)
            solution[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
            wrong = passive & (solution <= 0)
            if not wrong.any():
                x = solution
                break
            share = np.min(x[wrong] / np.maximum(x[wrong] - solution[wrong], 1e-300))
            x = x + share * (solution - x)
            passive &= x > 1e-12
            x[~passive] = 0.0
    result: NDArray[Any] = x / scale
    return result


class FittedEngine(msgspec.Struct, frozen=True):
    """The limits of an engine whose log was read, and the cost of its steps."""

    limits: SchedulerConfig
    capacity: Capacity
    cost: FittedCost
    engines: int = 1  # that ran on the machine

    @classmethod
    def measure(cls, paths: Sequence[Path]) -> Self:
        """Returns the engine of logs of `penstock serve --event-log`: of equal engines that ran on one machine at the
        same time. Raises ValueError for a file that is no such log, or has too few steps."""
        logs = [_events(path) for path in paths]
        begin = logs[0][0]
        assert isinstance(begin, Started)
        try:
            return cls(begin.config, begin.capacity, fit(measured_steps(*logs)), len(logs))
        except ValueError as error:
            raise ValueError(f"the event log {' and '.join(map(str, paths))}: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns what `penstock simulate --fit` has written to a file. Raises ValueError for another file."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ValueError(f"the cost file {path} cannot be read: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise ValueError(f"the cost file {path} is wrong ({error}): make it with penstock simulate --fit") from None


def _events(path: Path) -> list[Event]:
    try:
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except OSError as error:
        raise ValueError(
            f"the event log {path} cannot be read: {error.strerror}; give --fit the file of serve --event-log"
        ) from None
    events = list(read_events(lines))
    if not events or not isinstance(events[0], Started):
        raise ValueError(
            f"{path} does not begin with an engine's start: give --fit what penstock serve --event-log wrote"
        )
    return events


def measured_steps(*logs: Sequence[Event]) -> list[MeasuredStep]:
    """Returns the steps of the logs of engines that ran on one machine at the same time. A step begins at its plan, or
    at the result before it if the engine was not idle between, so what the engine does between two steps counts to the
    second. Raises ReplayMismatch."""
    engines = [_steps(events) for events in logs]
    ends = sorted(step.ended for steps in engines for step in steps)
    found = []
    for steps in engines:
        own = [step.ended for step in steps]
        for step in steps:
            began = step.ended - step.seconds
            all_results, results = (bisect_right(each, step.ended) - bisect_right(each, began) for each in (ends, own))
            found.append(msgspec.structs.replace(step, others=all_results - results))
    return found


def _steps(events: Sequence[Event]) -> list[MeasuredStep]:
    plans = replay(events)
    planned, applied, last = [], [], 0.0
    for event in events:
        match event:
            case Planned(now):
                last = now
            case Submitted():
                planned.append(last)
            case Applied(_, now):
                applied.append(now)
    counter, before, steps = StepCounter(), -1.0, []
    for plan, begin, end in zip(plans, planned, applied, strict=False):
        began = before if begin - before < CONTINUES else begin
        steps.append(MeasuredStep(counter.count(plan), end - began, end))
        before = end
    return steps
