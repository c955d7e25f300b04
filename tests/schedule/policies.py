"""Policies for tests: orders that change after each step."""

import random
from collections import Counter

from penstock.schedule.policy import DueOrder
from penstock.schedule.sequence import Request, Sequence
from penstock.schedule.step import Outstanding


class AnyOrder:
    """A new order after each step, and any victim."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def sort_key(self, request: Request) -> tuple[float, ...]:
        return (self._source.random(),)

    def victim(self, later: list[Sequence]) -> Sequence:
        return self._source.choice(later)

    def charge(self, step: Outstanding) -> bool:
        return True


class GivenOrder(DueOrder):
    """The places that a test sets, by request."""

    def __init__(self, **places: float) -> None:
        self.places = places

    def sort_key(self, request: Request) -> tuple[float, ...]:
        return (self.places[request.message.request_id],)

    def charge(self, step: Outstanding) -> bool:
        return True


class FairShare(DueOrder):
    """The tenant for which fewest tokens were computed comes first."""

    def __init__(self) -> None:
        self.computed: Counter[str] = Counter()  # tokens, by tenant

    def sort_key(self, request: Request) -> tuple[float, ...]:
        return (self.computed[request.message.tenant],)

    def charge(self, step: Outstanding) -> bool:
        for sequence, work in zip(step.sequences, step.work, strict=True):
            self.computed[sequence.request.message.tenant] += work.count
        return True
