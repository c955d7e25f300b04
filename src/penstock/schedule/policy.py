"""Who goes first. A policy gives a request a place once; admission and preemption both follow that one order."""

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


def enqueue(line: list[Sequence], sequence: Sequence) -> None:
    """Insert into a line kept in order."""
    insort(line, sequence, key=_order)


def dequeue(line: list[Sequence], sequence: Sequence) -> None:
    """Remove from a line kept in order; it must be there."""
    index = bisect_left(line, sequence.order, key=_order)
    if line[index] is not sequence:
        raise RuntimeError(f"sequence {sequence.id} is not where its order says")
    del line[index]
