"""Bounds the requests that wait for their first step, and estimates how long they wait."""

import math

from penstock.config.engine import EngineConfig
from penstock.messages import LATER_PRIORITY, Clock, QueueFull

WINDOW = 30.0  # seconds with waiting requests, over which the rate is measured
MOST_SECONDS = 120  # the largest Retry-After
LEAST_SECONDS = 1.0  # of measurement, before which a rate of zero means nothing


class RequestQueue:
    """Counts the waiting requests of one engine, and refuses more than the limits allow.

    It is in the API process, so that a refusal does not wait for a step. Tokens are those of prompts.
    """

    def __init__(self, *, max_num_seqs: int, max_waiting: int, max_waiting_tokens: int, clock: Clock):
        self.requests = self.tokens = 0  # that wait
        self.refused = self.late = 0
        self._max_num_seqs, self.max_waiting, self.max_waiting_tokens = max_num_seqs, max_waiting, max_waiting_tokens
        self.running = 0  # sequences, as the engine said last
        self._clock = clock
        self._mark = clock()
        # Seconds with waiting requests, and the requests and tokens that started in them. Older ones count less.
        self._seconds = self._started_requests = self._started_tokens = 0.0

    @classmethod
    def of(cls, config: EngineConfig, clock: Clock) -> "RequestQueue":
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            clock=clock,
        )

    @property
    def most(self) -> int:
        """Requests that may run or wait."""
        return self._max_num_seqs + self.max_waiting

    def check(self, tokens: int = 0, priority: int = 0) -> None:
        """Raise QueueFull if one more request, with a prompt of so many tokens, would exceed a limit. A request that
        would wait alone may have any number of tokens. From LATER_PRIORITY on, half of each limit holds, and a refusal
        is not counted: its sender tries again."""
        waiting = max(self.requests - max(self._max_num_seqs - self.running, 0), 0)
        if priority >= LATER_PRIORITY:
            if waiting >= -(-self.max_waiting // 2) or (
                waiting and self.tokens + tokens > self.max_waiting_tokens // 2
            ):
                raise QueueFull("half of the requests or tokens that may wait do so", self.retry_after())
        elif waiting >= self.max_waiting:
            self.refuse(f"{waiting} requests wait for the engine, the limit (--max-waiting)")
        elif waiting and self.tokens + tokens > self.max_waiting_tokens:
            self.refuse(
                f"the requests that wait for the engine have {self.tokens} tokens, and {tokens} more would exceed the "
                f"limit of {self.max_waiting_tokens} (--max-waiting-tokens)"
            )

    def refuse(self, reason: str) -> None:
        """Count a refusal, and raise it."""
        self.refused += 1
        seconds = self.retry_after()
        raise QueueFull(f"{reason}; try again in {seconds} s", seconds)

    def join(self, tokens: int) -> None:
        """Count a request that begins to wait."""
        self._measure()
        self.requests += 1
        self.tokens += tokens

    def leave(self, tokens: int, *, started: bool) -> None:
        """Count a request that ends its wait: `started` if the engine computes it next, else its client has gone."""
        self._measure()
        self.requests -= 1
        self.tokens -= tokens
        if started:
            self._started_requests += 1
            self._started_tokens += tokens

    def retry_after(self) -> int:
        """Return the seconds in which all waiting requests will have started, at the measured rate: 1 to 120."""
        self._measure()
        if not self.requests or (not self._started_requests and self._seconds < LEAST_SECONDS):
            return 1
        if not self._started_requests:
            return MOST_SECONDS
        shares = (self.requests / self._started_requests, self.tokens / max(self._started_tokens, 1.0))
        return max(1, min(math.ceil(max(shares) * self._seconds), MOST_SECONDS))

    def _measure(self) -> None:
        now = self._clock()
        passed, self._mark = now - self._mark, now
        if self.requests:
            fading = math.exp(-passed / WINDOW)
            self._seconds = self._seconds * fading + WINDOW * (1 - fading)
            self._started_requests *= fading
            self._started_tokens *= fading
