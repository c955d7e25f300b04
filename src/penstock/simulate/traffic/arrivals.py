"""Patterns of arrival times. Times are in seconds from the start, and functions of a seed."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec

MAX_RATE = 100_000.0  # requests a second


class _Pattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            most = MAX_RATE if name in ("rate", "low", "high", "peak") else 1e9
            if not 0 <= value <= most:
                raise ValueError(f"{name} {value}: give 0 to {most:g}")


class Poisson(_Pattern, frozen=True, tag="poisson"):
    """Independent arrivals at a mean `rate`. Gaps have a gamma distribution of shape `burstiness`: 1 is Poisson, less
    is burstier."""

    rate: float
    burstiness: float = 1.0


class Even(_Pattern, frozen=True, tag="even"):
    """Equal gaps."""

    rate: float


class Burst(_Pattern, frozen=True, tag="burst"):
    """`requests` at once, at second `at`."""

    requests: int
    at: float = 0.0


class OnOff(_Pattern, frozen=True, tag="on_off"):
    """Poisson at `rate` for `active` seconds, then nothing for `pause` seconds, and so on. (YAML reads on and off as
    true and false.)"""

    rate: float
    active: float
    pause: float


class Ramp(_Pattern, frozen=True, tag="ramp"):
    """Poisson, from `low` to `high` over the whole duration, by equal factors: in `steps` steps, or steadily."""

    low: float
    high: float
    steps: int = 0


class Daily(_Pattern, frozen=True, tag="daily"):
    """Poisson at a rate that follows a sine from `low`, at second 0, to `high`, in the middle of `period` seconds."""

    low: float
    high: float
    period: float = 86400.0


class Flash(_Pattern, frozen=True, tag="flash"):
    """Poisson at `rate`. At second `at` a crowd comes: the rate rises to `peak` within `rise` seconds, stays for `hold`
    seconds, and falls again within `fall` seconds."""

    rate: float
    peak: float
    at: float
    rise: float = 5.0
    hold: float = 60.0
    fall: float = 60.0


class Closed(_Pattern, frozen=True, tag="closed"):
    """`users` that each send a request, read its answer, wait for `think` seconds on average, and send the next."""

    users: int
    think: float = 0.0


Arrivals = Poisson | Even | Burst | OnOff | Ramp | Daily | Flash | Closed


def times(pattern: Arrivals, duration: float, chance: random.Random) -> Iterator[float]:
    """Yields arrival times below `duration`, in order. Of a closed loop, those of each user's first request."""
    match pattern:
        case Burst(requests, at):
            yield from [at] * requests
        case Closed(users, think):
            yield from sorted(chance.uniform(0.0, min(think, duration)) for _ in range(users))
        case Even(rate):
            yield from (i / rate for i in range(math.ceil(duration * rate)))
        case Poisson(rate, burstiness):
            now = 0.0
            while rate and burstiness:
                now += chance.gammavariate(burstiness, 1.0 / (rate * burstiness))
                if now >= duration:
                    return
                yield now
        case _:
            yield from _thinned(*rate_of(pattern, duration), duration, chance)


def rate_of(pattern: Arrivals, duration: float) -> tuple[Callable[[float], float], float]:
    """Returns the expected rate as a function of the time, and its maximum."""
    match pattern:
        case OnOff(rate, active, pause):
            return lambda at: rate if at % (active + pause) < active else 0.0, rate
        case Ramp(low, high, steps):
            lowest, end = max(low, 1e-9), max(duration, 1e-9)

            def ramp(at: float) -> float:
                share = min(at / end, 1.0)
                if steps > 1:
                    share = min(int(share * steps), steps - 1) / (steps - 1)
                return float(lowest * (high / lowest) ** share)

            return ramp, max(low, high)
        case Daily(low, high, period):
            return lambda at: low + (high - low) * (1 - math.cos(2 * math.pi * at / period)) / 2, max(low, high)
        case Flash(rate, peak, at, rise, hold, fall):
            edges = ((at, rate), (at + rise, peak), (at + rise + hold, peak), (at + rise + hold + fall, rate))
            return lambda now: _between(edges, now, rate), max(rate, peak)
        case Poisson(rate) | Even(rate):
            return lambda at: rate, rate
    return lambda at: 0.0, 0.0


def _between(edges: tuple[tuple[float, float], ...], now: float, outside: float) -> float:
    """Returns the value at `now` on the straight lines between `edges`."""
    for (begin, low), (end, high) in pairwise(edges):
        if begin <= now < end:
            return low + (high - low) * (now - begin) / (end - begin)
    return outside


def _thinned(rate: Callable[[float], float], most: float, duration: float, chance: random.Random) -> Iterator[float]:
    """Yields a Poisson process with a rate that changes: one at the highest rate, thinned (Lewis and Shedler, 1979)."""
    now = 0.0
    while most > 0:
        now += chance.expovariate(most)
        if now >= duration:
            return
        if chance.random() * most < rate(now):
            yield now
