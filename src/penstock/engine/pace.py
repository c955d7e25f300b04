"""Judges from an engine's events whether it has stopped. No clock is read: the client calls `tick` at intervals."""

from penstock.messages import EngineStats

LEAST = 10.0  # seconds without a step; a machine may be that busy with other things
LONGEST_STEPS = 10.0  # times the longest step lately
FADES = 0.98  # of the longest step, in each tick with steps: half after 34 of them
LARGEST_STEPS = 4.0  # times an estimate of the largest step
TICK = 1.0


class Pace:
    """The longest time that a step of this engine may take.

    It is at least 10 s, and follows from the steps so far: several times the longest one of late, or several times the
    time that a step of `most_tokens` would take at the least time for a token so far. A larger step takes less time for
    each token, so that the estimate is too high rather than too low. It is at most `step_deadline`, which holds while
    nothing has been measured.
    """

    def __init__(self, most_tokens: int, step_deadline: float) -> None:
        self.tick_seconds = min(TICK, step_deadline / 4)
        self._most_tokens = most_tokens
        self._step_deadline = step_deadline
        self._longest = 0.0  # mean seconds of a step between two ticks; what is long ago fades
        self._token: float | None = None  # least mean seconds of a token
        self._before = EngineStats()
        self._heard: int | None = None
        self._still = 0

    @property
    def deadline(self) -> float:
        """Seconds without an event after which the engine has stopped."""
        if self._token is None:
            return self._step_deadline
        longest = max(LONGEST_STEPS * self._longest, LARGEST_STEPS * self._most_tokens * self._token)
        return min(max(LEAST, longest), self._step_deadline)

    def tick(self, heard: int | None, stats: EngineStats) -> float:
        """Return the seconds without an event if these are too many, else 0.

        `heard` counts the events so far; None if none is due. Time in which this process was stopped counts as one
        tick.
        """
        self._measure(stats)
        self._still = self._still + 1 if heard is not None and heard == self._heard else 0
        self._heard = heard
        seconds = self._still * self.tick_seconds
        return seconds if seconds >= self.deadline else 0.0

    def _measure(self, stats: EngineStats) -> None:
        before, self._before = self._before, stats
        steps, tokens = stats.steps - before.steps, stats.computed_tokens - before.computed_tokens
        seconds = stats.step_seconds - before.step_seconds
        if steps <= 0 or tokens <= 0 or seconds <= 0:  # no step, or a new engine
            return
        self._longest = max(FADES * self._longest, seconds / steps)
        token = seconds / tokens
        self._token = token if self._token is None else min(token, self._token)
