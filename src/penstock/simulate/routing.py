"""How a simulation chooses a replica for a request: by the production router, or by simple ones to compare it with."""

import random
from collections.abc import Sequence
from typing import Protocol

from penstock.simulate.cluster_router import ClusterRouter
from penstock.simulate.replica import SimulatedReplica
from penstock.simulate.traffic.request import SimulatedRequest


class SimulatedRouter(Protocol):
    """Chooses among replicas that can take the request; there is at least one."""

    def choose(
        self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica: ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> SimulatedReplica:
        self._next += 1
        return replicas[(self._next - 1) % len(replicas)]


class RandomChoice:
    """Any replica, with equal chances."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"{seed}/router")

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> SimulatedReplica:
        return self._chance.choice(replicas)


class LeastLoaded:
    """The replica with the fewest tokens to compute, by what was sent to it. Of equal ones, the one chosen longest
    ago."""

    def __init__(self) -> None:
        self._order: dict[str, int] = {}
        self._chosen = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> SimulatedReplica:
        best = min(
            replicas,
            key=lambda each: (each.queue.tokens + len(each.in_flight), self._order.get(each.name, 0)),
        )
        self._chosen += 1
        self._order[best.name] = self._chosen
        return best


def make_router(name: str, seed: int) -> SimulatedRouter:
    """Returns a router by its name. Raises ValueError, which lists the names."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "random":
            return RandomChoice(seed)
        case "least_loaded":
            return LeastLoaded()
        case "cluster":
            return ClusterRouter(seed)
    raise ValueError(f"the router {name!r} is not known: name cluster, least_loaded, round_robin or random")
