"""Queues of sequences, sorted by `Sequence.order`."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from operator import attrgetter

from penstock.messages import SequenceResult
from penstock.schedule.policy import Policy
from penstock.schedule.sequence import Sequence
from penstock.schedule.step import Outstanding

# Charges a queue for a step, before its results are applied. The last argument is the time when they came, in seconds.
Charge = Callable[[Outstanding, Items[SequenceResult], float], None]

_order = attrgetter("order")


def enqueue(queue: list[Sequence], sequence: Sequence) -> None:
    """Insert a sequence into a sorted queue."""
    insort(queue, sequence, key=_order)


def dequeue(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a sorted queue. It must be there."""
    index = bisect_left(queue, sequence.order, key=_order)
    if queue[index] is not sequence:
        raise RuntimeError(f"sequence {sequence.id} is not where its order says")
    del queue[index]


def after(queue: list[Sequence], sequence: Sequence) -> list[Sequence]:
    """Return the part of a sorted queue after the sequence, which may be in the queue or not."""
    return queue[bisect_right(queue, sequence.order, key=_order) :]


class WaitingQueue(list[Sequence]):
    """The waiting sequences, sorted by the policy's keys. `charge` is None if a policy's keys never change.

    It is a list because every step asks whether it is empty. An iteration yields sequences that are pushed meanwhile,
    behind the one last yielded.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self.charge: Charge | None = None if policy.charge is None else self._charge

    def push(self, sequence: Sequence) -> None:
        if not sequence.keeps_order:
            self._set_order(sequence)
        enqueue(self, sequence)

    def peek(self) -> Sequence | None:
        """Return the first sequence, of at least one."""
        return self[0]

    def start(self, sequence: Sequence, computed: int) -> None:
        """Take the first sequence out of the queue: it runs from now on. `computed` of its tokens are cached."""
        self.pop(0)
        sequence.keeps_order = True

    def stopped(self, sequence: Sequence) -> None:
        """Note that a running sequence has ended or is preempted. The order does not depend on it."""

    def keep(self, sequence: Sequence) -> None:
        """Make the place of a sequence final."""
        sequence.keeps_order = True

    def remove(self, sequence: Sequence) -> None:
        dequeue(self, sequence)

    def _charge(self, step: Outstanding, results: Items[SequenceResult], now: float) -> None:
        """Charge the policy for a step. If its keys may have changed, sort again; final keys stay."""
        if self._policy.charge is None or not self._policy.charge(step):
            return
        for sequence in self:
            if not sequence.keeps_order:
                self._set_order(sequence)
        self.sort(key=_order)

    def _set_order(self, sequence: Sequence) -> None:
        sequence.order = (*self._policy.sort_key(sequence.request), sequence.id)
