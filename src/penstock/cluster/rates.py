"""Measures how long an engine's steps take, from the counters in its statistics."""

from penstock.messages import EngineStats

FADES = 0.98  # weight of what was measured before, at each new measurement
PRIOR = 1e-3  # of the solution before, as a share of the data's weight; keeps what is not observed as it was
LONGEST_FADES = 0.98
# Typical sizes, so that the three unknowns have similar weights: steps, sequences that decode, prompt tokens.
_SCALE = (1.0, 8.0, 256.0)


class StepRates:
    """Least squares over the time of steps: a fixed part, a part for each sequence that decodes, and a part for each
    prompt token. Older steps count less."""

    def __init__(self) -> None:
        self._before = EngineStats()
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._solution = [0.0] * 3
        self.longest = 0.0  # mean seconds of a step between two statistics, the longest lately

    @property
    def step_seconds(self) -> float:
        return self._solution[0] / _SCALE[0]

    @property
    def row_seconds(self) -> float:
        return self._solution[1] / _SCALE[1]

    @property
    def prefill_seconds(self) -> float:
        return self._solution[2] / _SCALE[2]

    def observe(self, stats: EngineStats) -> None:
        """Take the next statistics. Those of another engine, whose counters are lower, begin a new difference."""
        before, self._before = self._before, stats
        steps = stats.steps - before.steps
        seconds = stats.step_seconds - before.step_seconds
        rows = stats.decode_tokens - before.decode_tokens
        prompt = stats.prefill_tokens - before.prefill_tokens
        if steps <= 0 or seconds <= 0.0 or rows < 0 or prompt < 0:
            return
        self.longest = max(LONGEST_FADES * self.longest, seconds / steps)
        point = (steps / _SCALE[0], rows / _SCALE[1], prompt / _SCALE[2])
        weight = 1.0 / (seconds * seconds)  # errors are relative
        for i in range(3):
            self._sums[i] = FADES * self._sums[i] + weight * point[i] * seconds
            for j in range(3):
                self._products[i][j] = FADES * self._products[i][j] + weight * point[i] * point[j]
        self._solve()

    def _solve(self) -> None:
        ridge = PRIOR * sum(self._products[i][i] for i in range(3)) / 3
        rows = [
            [self._products[i][j] + (ridge if i == j else 0.0) for j in range(3)]
            + [self._sums[i] + ridge * self._solution[i]]
            for i in range(3)
        ]
        for i in range(3):  # Gaussian elimination: the matrix is positive definite
            for j in range(i + 1, 3):
                factor = rows[j][i] / rows[i][i]
                for k in range(i, 4):
                    rows[j][k] -= factor * rows[i][k]
        found = [0.0] * 3
        for i in (2, 1, 0):
            found[i] = (rows[i][3] - sum(rows[i][j] * found[j] for j in range(i + 1, 3))) / rows[i][i]
        self._solution = [max(value, 0.0) for value in found]
