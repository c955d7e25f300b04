"""Measures the cost of steps with drafts, and decides how many drafts pay.

All seconds are differences of times that the scheduler was given, so a replay chooses the same drafts.
"""

from collections.abc import Sequence as Items

WEIGHT = 0.1  # of a new measurement, when there are enough
STALE = 1024  # steps after which a measurement counts no more, so that a wrong one does not last
REFRESH = 48  # steps with drafts after which one without is taken, to compare with
FIRST = 3  # measurements
OUTLIER = 2.0  # times the mean: a longer step counts as this
ROW_SHARE = 0.05  # of a step without drafts: what a draft costs before it was measured
FEW = 4  # drafts that a step may have before any was measured, or as many as sequences
MIN_GAIN = 1.03  # tokens per second, against a step without drafts
LEAST_GAIN = 0.02  # tokens of a draft


class Mean:
    """A mean that follows its values. Among the first values the least counts: a disturbance makes a step longer."""

    __slots__ = ("count", "step", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0
        self.step = 0  # of the last value

    def add(self, value: float, step: int) -> None:
        if step - self.step > STALE:
            self.count = 0
        self.count += 1
        if self.count <= FIRST:
            self.value = value if self.count == 1 else min(self.value, value)
        else:
            self.value += (min(value, OUTLIER * self.value) - self.value) * WEIGHT
        self.step = step

    def known(self, step: int) -> bool:
        return self.count > 0 and step - self.step <= STALE


class StepTimes:
    """Seconds of decode steps by their number of rows, one for each sequence and one for each draft."""

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}  # by sequences
        self._drafted: dict[int, Mean] = {}  # by rows
        self._since_plain: dict[int, int] = {}  # steps with drafts of so many sequences

    def note(self, sequences: int, drafts: int, seconds: float, step: int) -> None:
        times, rows = (self._drafted, sequences + drafts) if drafts else (self._plain, sequences)
        mean = times.get(rows)
        if mean is None:
            mean = times[rows] = Mean()
        mean.add(seconds, step)
        self._since_plain[sequences] = self._since_plain.get(sequences, 0) + 1 if drafts else 0

    def plain(self, sequences: int, step: int) -> float | None:
        """Seconds of a step without drafts. None when it must be measured first."""
        mean = self._plain.get(sequences)
        if mean is None or not mean.known(step) or self._since_plain[sequences] >= REFRESH:
            return None
        return mean.value or None

    def with_drafts(self, sequences: int, plain: float, most: int, step: int) -> list[float]:
        """Seconds of steps with 0, 1, ... drafts: up to `most`, but at most twice as many as were measured. Sizes
        between measured ones lie on a line; beyond the largest, a draft costs half of what the measured ones cost each,
        or a share of a plain step. That is little, so that larger sizes are tried where that may pay."""
        seconds = [plain]
        low, drafts = plain, 0
        for rows in sorted(self._drafted):
            found, mean = rows - sequences, self._drafted[rows]
            if found < 1 or not mean.known(step):
                continue
            high = max(mean.value, plain)
            slope = (high - low) / (found - drafts)
            seconds += [low + slope * i for i in range(1, found - drafts + 1)]
            low, drafts = high, found
            if drafts >= most:
                break
        most = min(most, max(FEW, sequences, 2 * drafts))
        slope = max(min(plain * ROW_SHARE, plain / sequences / 2), (low - plain) / drafts / 2 if drafts else 0.0)
        seconds += [low + slope * i for i in range(1, most - drafts + 1)]
        return seconds[: most + 1]


def draft_counts(
    probabilities: Items[float],
    most: Items[int],
    rooms: Items[float],
    others: float,
    sequences: int,
    seconds: Items[float],
) -> list[int]:
    """How many drafts of each candidate give the most tokens per second, with no sequence slowed down.

    `probabilities`: that a candidate's draft is right if those before it are. `most`: its drafts at most. `rooms`: how
    long a step may take for it if it has no drafts; each token it can expect adds a plain step. `others`: how long a
    step may take for the sequences that are no candidates. `seconds`: of a step with 0, 1, ... drafts. A draft counts
    as a token times the probability that it and all before it are right.
    """
    gains = []
    for i, (probability, limit) in enumerate(zip(probabilities, most, strict=True)):
        gain = 1.0
        for _ in range(limit):
            gain *= probability
            if gain < LEAST_GAIN:
                break
            gains.append((gain, i))
    gains.sort(key=_gain, reverse=True)
    plain, rooms = seconds[0], list(rooms)
    tokens = float(sequences)
    best, chosen = tokens / plain * MIN_GAIN, 0
    for count, ((gain, i), time) in enumerate(zip(gains, seconds[1:], strict=False), 1):
        tokens += gain
        rooms[i] += gain * plain
        if tokens / time > best and time <= others and time <= min(rooms):
            best, chosen = tokens / time, count
    counts = [0] * len(probabilities)
    for _, i in gains[:chosen]:
        counts[i] += 1
    return counts


def _gain(pair: tuple[float, int]) -> float:
    return pair[0]
