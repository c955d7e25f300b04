"""Measures how long an engine's steps take, from the counters in its statistics."""

from collections.abc import Collection

from penstock.messages import EngineStats

FADES = 0.98  # weight of what was measured before, at each new measurement
PRIOR = 1e-3  # of the solution before, as a share of the data's weight; keeps what is not observed as it was
LONGEST_FADES = 0.98
# Share by which measured times may be wrong. Those of an engine that differ less from the fleet's mean count as that.
NOISE = 0.25
ENOUGH = 50  # measurements, after which they count half
# Typical sizes, so that the three unknowns have similar weights: steps, sequences that decode, prompt tokens.
_SCALE = (1.0, 8.0, 256.0)


class StepRates:
    """Least squares over the time of steps: a fixed part, a part for each sequence that decodes, and a part for each
    prompt token. Older steps count less."""

    def __init__(self) -> None:
        self._before = EngineStats()
        self._sums = (0.0,) * 9  # of the equations so far: six products of two factors, then the three factors
        self._solution = (0.0, 0.0, 0.0)
        self._seen = 0  # measurements
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

    @property
    def trust(self) -> float:
        """From 0 to 1: the first steps do not tell how their time divides into the three parts."""
        return self._seen / (self._seen + ENOUGH)

    def computed(self, tokens: int, step_tokens: int, begun: Collection[float], now: float) -> int:
        """Return how many tokens of the prompts that were begun at these times an engine has probably computed. Never
        all: their seconds are only known within NOISE, and an engine that has stopped must not seem to be free. Those
        that need several steps of at most `step_tokens` count whole, else engines with long prompts get further ones
        early, and the sequences that decode there wait for all of them."""
        rate = self.prefill_seconds
        if not begun or rate <= 0.0 or tokens > step_tokens:
            return 0
        return int(min((now - min(begun)) / rate, (1.0 - NOISE) * tokens))

    def observe(self, stats: EngineStats) -> None:
        """Take the next statistics. Those of another engine, whose counters are lower, begin a new difference."""
        before, self._before = self._before, stats
        steps = stats.steps - before.steps
        seconds = stats.step_seconds - before.step_seconds
        rows = stats.decode_tokens - before.decode_tokens
        prompt = stats.prefill_tokens - before.prefill_tokens
        if steps <= 0 or seconds <= 0.0 or rows < 0 or prompt < 0:
            return
        self._seen += 1
        self.longest = max(LONGEST_FADES * self.longest, seconds / steps)
        # Errors are relative, so each factor is divided by the seconds.
        a, b, c = (steps / _SCALE[0] / seconds, rows / _SCALE[1] / seconds, prompt / _SCALE[2] / seconds)
        aa, ab, ac, bb, bc, cc, a1, b1, c1 = self._sums
        self._sums = (
            *(FADES * aa + a * a, FADES * ab + a * b, FADES * ac + a * c),
            *(FADES * bb + b * b, FADES * bc + b * c, FADES * cc + c * c),
            *(FADES * a1 + a, FADES * b1 + b, FADES * c1 + c),
        )
        self._solve()

    def _solve(self) -> None:
        """Gaussian elimination, written out: the matrix is symmetric and positive definite."""
        aa, ab, ac, bb, bc, cc, a1, b1, c1 = self._sums
        x, y, z = self._solution
        ridge = PRIOR * (aa + bb + cc) / 3
        aa, a1 = aa + ridge, a1 + ridge * x
        b_by_a, c_by_a = ab / aa, ac / aa
        bb, bc, b1 = bb + ridge - b_by_a * ab, bc - b_by_a * ac, b1 + ridge * y - b_by_a * a1
        c_by_b = bc / bb
        z = (c1 + ridge * z - c_by_a * a1 - c_by_b * b1) / (cc + ridge - c_by_a * ac - c_by_b * bc)
        y = (b1 - bc * z) / bb
        x = (a1 - ab * y - ac * z) / aa
        self._solution = (max(x, 0.0), max(y, 0.0), max(z, 0.0))
