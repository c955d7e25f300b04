"""The order of requests: which waiting one starts next, and which running one is preempted.

A policy may change its order between steps in any way, for instance by the tokens that each tenant has had. Two rules
hold for any policy:

- The place of a sequence is final once it has started or has preempted another one, also while it waits again.
- A sequence is preempted only for one before it.

So two sequences cannot preempt each other in turn, and the first in the order is never preempted. All end, because the
first running sequence goes on until it ends or one before it starts. Among final places that happens a limited number
of times, and each sequence gets its final place only once.
"""

from typing import Protocol

from penstock.messages import GenerateRequest
from penstock.schedule.sequence import Request, Sequence
from penstock.schedule.step import Outstanding

PATIENCE = 10.0  # seconds that a request without a deadline of its first token counts as willing to wait


class Policy(Protocol):
    """The order of one scheduler's requests. It may change in `charge` alone, and only by what that was given: so the
    same events give the same plans."""

    def place(self, request: Request) -> tuple[float, ...]:
        """Return the request's place: a smaller one starts sooner. Equal places keep the order in which they came. All
        places have the same length, and no NaN."""
        ...

    def victim(self, later: list[Sequence]) -> Sequence:
        """Return the sequence to preempt of those that may be, in order. There is at least one."""
        ...

    def charge(self, step: Outstanding) -> bool:
        """Count the tokens that a step has computed. Return whether places of requests may have changed: `place` is
        then called again for those that wait."""
        ...


class DueOrder:
    """The earliest due first, and the last one is preempted. A request's place does not change."""

    def place(self, request: Request) -> tuple[float, ...]:
        return due_order(request.message, request.arrival)

    def victim(self, later: list[Sequence]) -> Sequence:
        return later[-1]

    def charge(self, step: Outstanding) -> bool:
        return False


def due_order(request: GenerateRequest, arrival: float) -> tuple[float, ...]:
    """The request's place. A smaller one is admitted sooner and preempted later: the earliest due first. Equal places
    keep their order. A request is due at its deadline, or PATIENCE seconds after its arrival if that is
    sooner; `priority` adds as many seconds.

    So with priorities from -N to N, a request is never behind one that arrives more than PATIENCE + 2 N seconds after
    it: only a bounded number of requests come before it, and nothing waits for ever.
    """
    due = arrival + PATIENCE
    for deadline in (request.deadline, request.first_token_deadline):
        if deadline is not None and deadline < due:
            due = max(deadline, arrival)
    return (due + request.priority, arrival)
