"""Starts and ends engines until there are as many as wanted. Processes of this machine, Kubernetes or Ray run them.

`reconcile` compares what there is with what is wanted and orders the difference. It does not remember its orders: one
that was lost is given again, and one that was executed twice changes nothing.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from penstock.messages import EngineError

START_SECONDS = 1800.0  # after which an engine that is not ready is ended; another one is started in its place
DRAIN_SECONDS = 900.0  # after which an engine that drains is ended with what it still has


PlaceStatus = Literal["starting", "ready", "draining"]


class PlacedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that a provider has started."""

    name: str
    status: PlaceStatus
    seconds: float = 0.0  # for which it has had this status
    requests: int = 0  # that it has


class Placement(Protocol):
    """A provider of engines. Each method may be called again with the same arguments. All raise PlacementError if the
    provider cannot be reached, and then nothing is certain."""

    async def engines(self) -> Sequence[PlacedEngine]:
        """Return the engines that there are, without those that have ended."""

    async def ensure(self, count: int) -> None:
        """Start engines until there are `count`, those that drain not counted. A provider whose own controller ends
        surplus engines lets it end those that were given to `drain`."""

    async def drain(self, name: str) -> None:
        """Give an engine no more requests, and end it when it has none."""

    async def kill(self, name: str) -> None:
        """End an engine at once."""

    async def changed(self) -> None:
        """Return when the engines may have changed. The caller bounds the time."""


class PlacementError(EngineError):
    """A provider did not do what was ordered. The message says why."""


class Orders(NamedTuple):
    """The names of engines to end at once, and of those to drain."""

    kill: tuple[str, ...]
    drain: tuple[str, ...]


def orders(engines: Sequence[PlacedEngine], wanted: int) -> Orders:
    """Return which engines must end so that no more than `wanted` stay: first those that are not ready yet, then those
    with the fewest requests. An engine that takes too long to start or to drain ends at once."""
    late = [one for one in engines if one.status == "starting" and one.seconds > START_SECONDS]
    stuck = [one for one in engines if one.status == "draining" and one.seconds > DRAIN_SECONDS]
    staying = [one for one in engines if one.status != "draining" and one not in late]
    staying.sort(key=lambda one: (one.status == "ready", one.requests, -one.seconds, one.name))
    surplus = staying[: max(len(staying) - wanted, 0)]
    return Orders(tuple(one.name for one in (*late, *stuck)), tuple(one.name for one in surplus))


async def reconcile(placement: Placement, engines: Sequence[PlacedEngine], wanted: int) -> None:
    """Order what is missing or too much among `engines`, which the provider has just returned. Raises
    PlacementError."""
    kill, drain = orders(engines, wanted)
    for name in kill:
        await placement.kill(name)
    for name in drain:
        await placement.drain(name)
    await placement.ensure(wanted)
