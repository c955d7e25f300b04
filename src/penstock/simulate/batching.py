"""Static and dynamic batching, to compare continuous batching with. Only the simulator has them.

A batch begins when `size` requests wait, or `window` seconds after the first of them came. Prompts are padded to the
longest. Every row is computed until the longest output ends, and the next batch begins after that. Static batching
waits for a full batch; dynamic batching has a short window.
"""

from collections.abc import Sequence

from penstock.messages import (
    EngineStats,
    GenerateRequest,
    NewSequence,
    RequestTiming,
    StepPlan,
    StepResult,
    TokenDelta,
    Work,
)


class BatchScheduler:
    """Has the methods of Scheduler that a simulated replica calls."""

    def __init__(self, size: int, window: float) -> None:
        self._size, self._window = size, window
        self._waiting: list[tuple[GenerateRequest, float]] = []  # with the time at which it came
        self._batch: list[tuple[GenerateRequest, float]] = []
        self._work: tuple[Work, ...] = ()
        self._started = self._first = 0.0
        self._made = 0  # tokens of each row so far
        self._longest = 0
        self._next_sequence = self._plans = 1
        self._outstanding = False
        self._gone: tuple[int, ...] = ()
        self._steps = self._computed = 0

    def add(self, request: GenerateRequest, now: float) -> list[TokenDelta]:
        """Queues a request."""
        self._waiting.append((request, now))
        return []

    def abort(self, request_id: str, now: float) -> list[TokenDelta]:
        """Ends a request that waits; one in the batch is computed to its end, as there is no other way."""
        self._waiting = [each for each in self._waiting if each[0].request_id != request_id]
        return []

    def drop_late(self, now: float) -> list[tuple[str, float]]:
        """Returns nothing: deadlines are not known here."""
        return []

    def due(self) -> float | None:
        """Returns when the waiting requests become a batch; None if none waits, or a batch runs."""
        if self._batch or not self._waiting:
            return None
        came = self._waiting[0][1]
        return came if len(self._waiting) >= self._size else round(came + self._window, 9)  # a whole nanosecond

    @property
    def num_running(self) -> int:
        """The rows of the batch."""
        return len(self._batch)

    @property
    def useful_rows(self) -> int:
        """The rows that still need tokens."""
        return sum(request.sampling.max_tokens > self._made for request, _ in self._batch)

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step of the batch, or the first one of a new batch, or None."""
        if self._outstanding:
            return None
        new: tuple[NewSequence, ...] = ()
        if not self._batch:
            due = self.due()
            if due is None or now < due:
                return None
            new = self._begin(now)
        plan = StepPlan(self._plans, self._work, new, gone=self._gone)
        self._gone = ()
        self._plans += 1
        self._outstanding = True
        self._steps += 1
        self._computed += sum(work.count for work in self._work)
        return plan

    def _begin(self, now: float) -> tuple[NewSequence, ...]:
        self._batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        self._started, self._made = now, 0
        self._longest = max(request.sampling.max_tokens for request, _ in self._batch)
        padded = max(len(request.prompt_ids) for request, _ in self._batch)
        first = self._next_sequence
        self._next_sequence += len(self._batch)
        self._work = tuple(Work(first + i, padded, True) for i in range(len(self._batch)))
        return tuple(
            NewSequence(first + i, request.prompt_ids, padded, 0, (), request.sampling, 0)
            for i, (request, _) in enumerate(self._batch)
        )

    def begun(self, plan: StepPlan) -> Sequence[str]:
        """Returns the ids of the requests of a new batch."""
        return [request.request_id for request, _ in self._batch] if plan.new else []

    def apply(self, result: StepResult, now: float) -> list[TokenDelta]:
        """Returns the first token of each request after the prompts, and all other tokens at the end of the batch."""
        self._outstanding = False
        self._made += 1
        deltas = []
        if self._made == 1:
            self._first = now
            self._work = tuple(Work(work.seq, 1, True) for work in self._work)
            if self._longest > 1:
                deltas = [TokenDelta(r.request_id, 0, 0, (r.sampling.seed,)) for r, _ in self._batch]
        if self._made < self._longest:
            return deltas
        for request, came in self._batch:
            count, begin = request.sampling.max_tokens, 1 if self._longest > 1 else 0
            timing = RequestTiming(self._started - came, self._first - self._started, now - self._first)
            tokens = (request.sampling.seed,) * (count - begin)
            deltas.append(TokenDelta(request.request_id, 0, begin, tokens, "length", timing=timing))
        self._batch = []
        self._gone = tuple(work.seq for work in self._work)
        return deltas

    def stats(self, *seconds: float) -> EngineStats:
        """Returns the gauges and counters that there are."""
        running = len(self._batch)
        return EngineStats(
            steps=self._steps, running=running, waiting=len(self._waiting), computed_tokens=self._computed
        )
