"""Routers of a simulation: the production router, and simple ones to compare it with."""

import random
from collections.abc import Sequence
from typing import Protocol

from penstock.simulate.cluster_router import ClusterRouter
from penstock.simulate.replica import SimulatedReplica
from penstock.simulate.traffic.request import SimulatedRequest


class SimulatedRouter(Protocol):
    """Chooses a replica for each request, among those that can take it. There is at least one."""

    def choose(
        self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float
    ) -> SimulatedReplica: ...


class RoundRobin:
    """Chooses the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> SimulatedReplica:
        self._next += 1
        return replicas[(self._next - 1) % len(replicas)]


class RandomChoice:
    """Chooses at random, each replica with the same probability."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"{seed}/router")

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> SimulatedReplica:
        return self._chance.choice(replicas)


class LeastLoaded:
    """Chooses the replica with the least work: prompt tokens that wait, and one token for each of its requests. Of
    equal ones, the one chosen longest ago."""

    def __init__(self) -> None:
        self._order: dict[str, int] = {}
        self._chosen = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> SimulatedReplica:
        best = min(replicas, key=lambda replica: (_load(replica), self._order.get(replica.name, 0)))
        self._chosen += 1
        self._order[best.name] = self._chosen
        return best


def _load(replica: SimulatedReplica) -> int:
    waiting = sum([request.prompt_tokens for request in replica.waiting.values()])
    return waiting + len(replica.in_flight)


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
