"""Queues of sequences, kept in order."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter

from penstock.schedule.policy import Policy
from penstock.schedule.sequence import Sequence

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


def after(queue: list[Sequence], sequence: Sequence) -> list[Sequence]:
    """Return the part of the queue that comes after the sequence, which may be in it or not."""
    return queue[bisect_right(queue, sequence.order, key=_order) :]


class WaitingQueue:
    """The sequences that wait, by the policy's places."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Yields them in order. What is pushed meanwhile comes too, if it is after the last one that was yielded."""
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        if not sequence.keeps_order:
            self._give_place(sequence)
        enqueue(self._sequences, sequence)

    def peek(self) -> Sequence:
        """The first one."""
        return self._sequences[0]

    def pop(self) -> Sequence:
        return self._sequences.pop(0)

    def remove(self, sequence: Sequence) -> None:
        dequeue(self._sequences, sequence)

    def reorder(self) -> None:
        """Take the policy's new places."""
        for sequence in self._sequences:
            if not sequence.keeps_order:
                self._give_place(sequence)
        self._sequences.sort(key=_order)

    def _give_place(self, sequence: Sequence) -> None:
        sequence.order = (*self._policy.place(sequence.request), sequence.id)
