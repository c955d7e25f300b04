"""The order of requests: which waiting request starts next, and which running sequence is preempted.

A policy gives each request a sort key. It may change the keys between steps in any way, for instance by the tokens that
each tenant has got. Two rules hold for any policy:

- A sequence's key is final once it has started or has preempted another one, also while it waits again.
- A sequence is preempted only for one before it in the order.

So two sequences cannot preempt each other in turn, and the first one in the order is never preempted. Every sequence
ends: the first running one continues until it ends or until one before it starts. This can happen only a limited number
of times, because keys of started sequences are final.
"""

from collections.abc import Callable
from typing import Protocol

from penstock.messages import GenerateRequest
from penstock.schedule.sequence import Request, Sequence
from penstock.schedule.step import Outstanding

PATIENCE = 10.0  # seconds after its arrival at which a request without an earlier deadline is due


class Policy(Protocol):
    """The order of one scheduler's requests. It may change only in `charge`, and only by the steps passed to it: then
    the same events give the same plans."""

    def sort_key(self, request: Request) -> tuple[float, ...]:
        """Return the request's sort key. The smallest key starts first; equal keys keep the order of arrival. All keys
        have the same length and no NaN."""

    def victim(self, later: list[Sequence]) -> Sequence:
        """Return the sequence to preempt. `later` has the candidates in order, at least one."""

    @property
    def charge(self) -> Callable[[Outstanding], bool] | None:
        """A function that counts the tokens that a step has computed. It returns True if sort keys may have changed:
        `sort_key` is then called again for waiting requests. None if keys never change."""


class DueOrder:
    """The request that is due first starts first, and the one due last is preempted."""

    charge: Callable[[Outstanding], bool] | None = None

    def sort_key(self, request: Request) -> tuple[float, ...]:
        return due_order(request.message, request.arrival)

    def victim(self, later: list[Sequence]) -> Sequence:
        return later[-1]


def due_order(request: GenerateRequest, arrival: float) -> tuple[float, ...]:
    """Return the sort key (due time, arrival). A request is due at its deadline, or PATIENCE seconds after its arrival
    if that is sooner. `priority` and `behind` are added to the due time, in seconds.

    So with priorities from -N to N, a request is never behind one that arrives more than PATIENCE + 2 N seconds, and
    `behind`, later.
    Only a bounded number of requests come before it, and no request waits forever.
    """
    due = arrival + PATIENCE
    for deadline in (request.deadline, request.first_token_deadline):
        if deadline is not None and deadline < due:
            due = max(deadline, arrival)
    return (due + request.priority + request.behind, arrival)
