"""The order of requests. A request gets its place once; admission and preemption follow that order."""

from bisect import bisect_left, insort
from operator import attrgetter

from penstock.messages import GenerateRequest
from penstock.schedule.sequence import Sequence

PATIENCE = 10.0  # seconds that a request without a deadline of its first token counts as willing to wait


def due_order(request: GenerateRequest, arrival: float) -> tuple[float, ...]:
    """The request's place. A smaller one is admitted sooner and preempted later: the earliest due first. Equal places
    keep their order. A request is due at its deadline, or PATIENCE seconds after its arrival if that is
    sooner; `priority` adds as many seconds.

    So with priorities from -N to N, a request is never behind one that arrives more than PATIENCE + 2 N seconds after
    it: only a bounded number of requests come before it, and nothing waits for ever. The place does not change, so two
    requests cannot preempt each other in turn.
    """
    due = arrival + PATIENCE
    for deadline in (request.deadline, request.first_token_deadline):
        if deadline is not None and deadline < due:
            due = max(deadline, arrival)
    return (due + request.priority, arrival)


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
