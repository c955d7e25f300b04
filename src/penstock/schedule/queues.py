"""Queues of sequences, sorted by `Sequence.order`."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from operator import attrgetter

from penstock.messages import SequenceResult
from penstock.schedule.policy import Policy
from penstock.schedule.sequence import Sequence
from penstock.schedule.step import Outstanding

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


class WaitingQueue:
    """The waiting sequences, sorted by the policy's keys."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Yields the sequences in order, with those pushed during the iteration behind the one last yielded."""
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        if not sequence.keeps_order:
            self._set_order(sequence)
        enqueue(self._sequences, sequence)

    def peek(self) -> Sequence | None:
        """Return the first sequence, of at least one."""
        return self._sequences[0]

    def start(self, sequence: Sequence, computed: int) -> None:
        """Take the first sequence out of the queue: it runs from now on. `computed` of its tokens are cached."""
        self._sequences.pop(0)
        sequence.keeps_order = True

    def stopped(self, sequence: Sequence) -> None:
        """Note that a running sequence has ended or is preempted. The order does not depend on it."""

    def keep(self, sequence: Sequence) -> None:
        """Make the place of a sequence final."""
        sequence.keeps_order = True

    def remove(self, sequence: Sequence) -> None:
        dequeue(self._sequences, sequence)

    def charge(self, step: Outstanding, results: Items[SequenceResult], now: float) -> None:
        """Charge the policy for a step. If its keys may have changed, sort again; final keys stay."""
        if not self._policy.charge(step):
            return
        for sequence in self._sequences:
            if not sequence.keeps_order:
                self._set_order(sequence)
        self._sequences.sort(key=_order)

    def _set_order(self, sequence: Sequence) -> None:
        sequence.order = (*self._policy.sort_key(sequence.request), sequence.id)
