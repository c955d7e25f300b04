"""How a simulation chooses a replica for a request: by the production router, or by simple ones to compare it with."""

from collections.abc import Sequence
from typing import Protocol

from penstock.simulate.cluster_router import ClusterRouter
from penstock.simulate.replica import Routed, SimulatedReplica
from penstock.simulate.traffic.request import SimulatedRequest


class SimulatedRouter(Protocol):
    """Chooses among replicas that can take the request; there is at least one."""

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> Routed: ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> Routed:
        self._next += 1
        return Routed(replicas[(self._next - 1) % len(replicas)], request.prompt_tokens)


class LeastLoaded:
    """The replica with the fewest tokens to compute, by what was sent to it. Equal ones take turns."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> Routed:
        self._turn = (self._turn + 1) % len(replicas)
        in_turn = (*replicas[self._turn :], *replicas[: self._turn])
        least = min(in_turn, key=lambda each: each.queue.tokens + len(each.in_flight))
        return Routed(least, request.prompt_tokens)


def make_router(name: str, seed: int) -> SimulatedRouter:
    """Returns a router by its name. Raises ValueError, which lists the names."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "cluster":
            return ClusterRouter(seed)
    raise ValueError(f"the router {name!r} is not known: name cluster, least_loaded or round_robin")
