"""Named resources that the batches of several models share, as in Triton's rate limiter.

A batch runs only when what its model needs is free. A pure state machine: the driver calls `take` when a batch is due,
and `give` when it has ended.

The model that has run least goes first, where a run of a model with priority N counts N times. What it needs is kept
for it, so that models which need less cannot starve it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec


class ResourceNeeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The resources that a batch of a model takes while it runs."""

    resources: dict[str, int] = {}  # units of each
    priority: int = 1  # how often a run counts


class _User(msgspec.Struct, eq=False):
    needs: ResourceNeeds
    score: int  # of its runs so far
    waits: bool = False
    holds: int = 0  # batches that run


class ResourcePool:
    """The units of each resource, and the models that need them."""

    def __init__(self, units: Mapping[str, int] | None = None) -> None:
        """A resource that is not in `units` has as many as the model that needs the most of it."""
        self._units = dict(units or {})
        self._users: dict[int, _User] = {}
        self._numbers = 0

    def check(self, needs: ResourceNeeds) -> None:
        """Raises ValueError if a model needs more than there is."""
        for name, count in needs.resources.items():
            if count > self._units.get(name, count):
                raise ValueError(
                    f"a batch needs {count} units of the resource {name!r}, but there are {self._units[name]}; set a "
                    f"larger --rate-limit-resource {name}:COUNT"
                )

    def add(self, needs: ResourceNeeds) -> int:
        """Returns a number for a model."""
        self._numbers += 1
        # A new model is not ahead of those that have run for long.
        score = min((each.score for each in self._users.values()), default=0)
        self._users[self._numbers] = _User(needs, score)
        return self._numbers

    def remove(self, user: int) -> bool:
        """Forgets a model, and frees what it holds. Returns False if it was forgotten before."""
        return self._users.pop(user, None) is not None

    def take(self, user: int) -> bool:
        """Takes what a batch needs, and returns True; else the model waits until this succeeds, or until `leave`."""
        mine = self._users[user]
        mine.waits = True
        first = (each for each in self._users.values() if each.waits and each.score < mine.score)
        if not self._free(mine, first):
            return False
        mine.waits, mine.holds, mine.score = False, mine.holds + 1, mine.score + mine.needs.priority
        return True

    def leave(self, user: int) -> bool:
        """Says that no batch of a model is due. Returns whether one was, so that others may run now."""
        mine = self._users[user]
        before, mine.waits = mine.waits, False
        return before

    def give(self, user: int) -> None:
        """Frees what a batch had."""
        if (mine := self._users.get(user)) is not None:
            mine.holds -= 1

    def _free(self, mine: _User, first: Iterable[_User]) -> bool:
        """Whether the needs of a model are free, and not needed by those that go before it."""
        taken = Counter[str]()
        for each in self._users.values():
            for name, count in each.needs.resources.items():
                taken[name] += count * each.holds
        for each in first:
            taken.update(each.needs.resources)
        return all(taken[name] + count <= self._all(name) for name, count in mine.needs.resources.items())

    def _all(self, name: str) -> int:
        most = max((each.needs.resources.get(name, 0) for each in self._users.values()), default=0)
        return self._units.get(name, most)
