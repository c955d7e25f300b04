"""The order of requests. A policy gives a request its place once; admission and preemption follow that order."""

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Protocol

from penstock.messages import GenerateRequest
from penstock.schedule.sequence import Sequence


class QueuePolicy(Protocol):
    def __call__(self, request: GenerateRequest, arrival: float) -> tuple[float, ...]:
        """The request's place. A smaller one is admitted sooner and preempted later. Equal places keep their order."""
        ...


def by_priority(request: GenerateRequest, arrival: float) -> tuple[float, ...]:
    """Lower `priority` first; first come, first served among equals."""
    return (request.priority, arrival)


_order = attrgetter("order")


def enqueue(queue: list[Sequence], sequence: Sequence) -> None:
    """Insert into a queue kept in order."""
    insort(queue, sequence, key=_order)


def dequeue(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove from a queue kept in order; it must be there."""
    index = bisect_left(queue, sequence.order, key=_order)
    if queue[index] is not sequence:
        raise RuntimeError(f"sequence {sequence.id} is not where its order says")
    del queue[index]
