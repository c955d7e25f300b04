"""The requests of a benchmark: lengths, prompts and arrival times. All are functions of a seed."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LENGTH = 10**7  # tokens of a prompt or an output
MAX_REQUESTS = 10**6


@dataclass(frozen=True)
class Case:
    """`count` requests with `prompt_len` random tokens each, and exactly `output_len` output tokens each."""

    count: int
    prompt_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.count}x{self.prompt_len}/{self.output_len}"


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload. `arrival` is in seconds after the start."""

    prompt_ids: tuple[int, ...]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True)
class LengthRange:
    """Lengths that are drawn uniformly from low to high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "LengthRange":
        """Parses "256" or "100-400". ValueError for another text."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]) <= MAX_LENGTH:
            raise ValueError(
                f"{text!r} is not a length; write N or LOW-HIGH, 1 or more, LOW not above HIGH, up to {MAX_LENGTH}"
            )
        return cls(int(match[1]), int(match[2] or match[1]))

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


def parse_cases(text: str) -> list[Case]:
    """Parses cases such as "1x256/64,8x256/64". ValueError names the one that is not NxIN/OUT."""
    cases = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)/(\d+)", part.strip())
        if match is None or 0 in (numbers := [int(group) for group in match.groups()]):
            raise ValueError(f"--cases: {part!r} is not a case; write NxIN/OUT with positive numbers, such as 8x256/64")
        if numbers[0] > MAX_REQUESTS:
            raise ValueError(f"--cases: {part!r} has {numbers[0]} requests; give at most {MAX_REQUESTS}")
        cases.append(Case(*numbers))
    return cases


def random_prompt(length: int, vocab_size: int, source: random.Random) -> tuple[int, ...]:
    """Random token ids. The first ten of a vocabulary are left out, as they are often special tokens."""
    low = min(10, vocab_size - 1)
    return tuple(source.randint(low, vocab_size - 1) for _ in range(length))


def fixed(case: Case, vocab_size: int, seed: int = 0) -> list[WorkloadRequest]:
    """The items of a case. All arrive at once."""
    source = random.Random(f"{seed}/{case}")
    return [
        WorkloadRequest(random_prompt(case.prompt_len, vocab_size, source), case.output_len) for _ in range(case.count)
    ]


def arrivals(count: int, rate: float | None, burstiness: float, source: random.Random) -> list[float]:
    """Arrival times at `rate` per second. Gaps have a gamma distribution of shape `burstiness` (1: Poisson; infinity:
    all are equal). Without a rate, all arrive at once.
    """
    if rate is None:
        return [0.0] * count
    if math.isinf(burstiness):
        return [i / rate for i in range(count)]
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


def mixed(
    count: int,
    prompt: LengthRange,
    output: LengthRange,
    vocab_size: int,
    *,
    shared_prefix: int = 0,
    rate: float | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Requests of random lengths. All begin with the same `shared_prefix` tokens, which `prompt` does not count."""
    source = random.Random(seed)
    prefix = random_prompt(shared_prefix, vocab_size, source)
    times = arrivals(count, rate, burstiness, source)
    return [
        WorkloadRequest(prefix + random_prompt(prompt.draw(source), vocab_size, source), output.draw(source), arrival)
        for arrival in times
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; nan if there are no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
