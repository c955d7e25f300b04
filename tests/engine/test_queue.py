"""The bounds of the waiting requests, and the time after which a refused one may come again."""

import random

import pytest

from penstock.engine.queue import RequestQueue
from penstock.messages import LATER_PRIORITY, QueueFull


class Queue(RequestQueue):
    """A queue with a clock that a test moves."""

    def __init__(self, *, max_num_seqs: int = 2, max_waiting: int = 3, max_waiting_tokens: int = 100) -> None:
        self.now = 0.0
        super().__init__(
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            clock=lambda: self.now,
        )


def test_what_can_start_at_once_does_not_wait() -> None:
    queue = Queue()
    for _ in range(5):
        queue.check(1)
        queue.join(1)
    with pytest.raises(QueueFull, match=r"3 requests wait for the engine, the limit \(--max-waiting\); try again in 1"):
        queue.check(1)
    for _ in range(2):
        queue.leave(1, started=True)
    queue.running = 2
    with pytest.raises(QueueFull):
        queue.check(1)
    queue.leave(1, started=False)
    queue.check(1)
    assert (queue.requests, queue.tokens, queue.refused) == (2, 2, 2)


def test_tokens_are_bounded_but_a_request_alone_may_wait() -> None:
    queue = Queue()
    queue.running = 2
    queue.check(1000)
    queue.join(1000)
    with pytest.raises(QueueFull, match=r"have 1000 tokens, and 1 more would exceed the limit of 100"):
        queue.check(1)
    queue.leave(1000, started=True)
    queue.join(60)
    queue.check(40)
    with pytest.raises(QueueFull, match="--max-waiting-tokens"):
        queue.check(41)


def test_requests_for_later_leave_half_of_the_queue_to_others() -> None:
    queue = Queue(max_waiting=4)
    queue.running = 2
    for _ in range(2):
        queue.check(20, LATER_PRIORITY)
        queue.join(20)
    for tokens in (1, 20):
        with pytest.raises(QueueFull, match="half of the requests or tokens"):
            queue.check(tokens, LATER_PRIORITY)
    queue.check(60, LATER_PRIORITY - 1)
    queue.leave(20, started=True)
    with pytest.raises(QueueFull):
        queue.check(31, LATER_PRIORITY)
    queue.check(30, LATER_PRIORITY)
    assert queue.refused == 0


@pytest.mark.parametrize("rate", [0.8, 4.0, 50.0])
def test_retry_after_is_when_the_queue_has_started(rate: float) -> None:
    """Requests of different sizes start at `rate` tokens a second times 100. The time named is the time it takes."""
    rng = random.Random(0)
    queue = Queue(max_waiting=200, max_waiting_tokens=10**6)
    waiting: list[int] = []
    for _ in range(400):
        while len(waiting) < 20:
            waiting.append(rng.randrange(20, 300))
            queue.join(waiting[-1])
        tokens = waiting.pop(0)
        queue.now += tokens / (100 * rate)
        queue.leave(tokens, started=True)
    named = queue.retry_after()
    due = sum(waiting) / (100 * rate)
    assert due / 1.5 <= named <= max(1.5 * due, 1)


def test_retry_after_is_bounded() -> None:
    queue = Queue()
    assert queue.retry_after() == 1, "nothing waits"
    queue.join(10)
    assert queue.retry_after() == 1, "nothing is known"
    queue.now += 5
    assert queue.retry_after() == 120, "nothing starts"
    queue.leave(10, started=True)
    assert queue.retry_after() == 1, "nothing waits"
    for _ in range(3):
        queue.join(10)
    assert 13 <= queue.retry_after() <= 15, "one in five seconds"


def test_idle_time_does_not_count() -> None:
    queue = Queue()
    for _ in range(10):
        queue.join(10)
        queue.now += 1
        queue.leave(10, started=True)
        queue.now += 1000
    for _ in range(3):
        queue.join(10)
    assert queue.retry_after() == 3


def test_a_faster_engine_is_noticed() -> None:
    queue = Queue(max_waiting=1000)
    for seconds in (1.0, 0.1):
        for _ in range(round(90 / seconds)):
            queue.join(10)
            queue.now += seconds
            queue.leave(10, started=True)
    for _ in range(100):
        queue.join(10)
    assert 10 <= queue.retry_after() <= 13
