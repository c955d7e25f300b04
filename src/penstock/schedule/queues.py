"""Queues of sequences, sorted by `Sequence.order`."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter

from penstock.schedule.policy import Policy
from penstock.schedule.sequence import Sequence

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

    def peek(self) -> Sequence:
        """Return the first sequence."""
        return self._sequences[0]

    def pop(self) -> Sequence:
        return self._sequences.pop(0)

    def remove(self, sequence: Sequence) -> None:
        dequeue(self._sequences, sequence)

    def reorder(self) -> None:
        """Sort again by the policy's new keys. Sequences with a final key keep theirs."""
        for sequence in self._sequences:
            if not sequence.keeps_order:
                self._set_order(sequence)
        self._sequences.sort(key=_order)

    def _set_order(self, sequence: Sequence) -> None:
        sequence.order = (*self._policy.sort_key(sequence.request), sequence.id)
