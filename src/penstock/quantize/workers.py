"""Work that is done side by side, by Python threads that each have torch compute with one thread.

Torch's own threads spin at the end of every operation until all of them are there. GPTQ is thousands of small
operations: beside another busy program it took eight times as long that way. The parts here are large and need nothing
of each other, so they share a processor fairly, and their bits do not depend on the number of threads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """Threads that compute parts of a work. A single one is the thread that calls."""

    def __init__(self, count: int = 1) -> None:
        self._pool = ThreadPoolExecutor(count) if count > 1 else None
        self._count = count

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yields the results for all items, in order. One more than the workers are in memory at once. A function must
        not call `map` itself: it would wait for its own thread."""
        if self._pool is None:
            yield from map(function, items)
            return
        waiting = deque[Future[R]]()
        for item in items:
            waiting.append(self._pool.submit(_computed, function, item))
            if len(waiting) > self._count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@torch.inference_mode()
def _computed(function: Callable[[T], R], item: T) -> R:
    return function(item)
