"""The engines of a fleet, and what a request costs at each. What does not depend on the request is computed when a
picture of an engine changes, so that a choice among many engines is a few operations for each.

Old statistics count less than the mean of the fleet, and measured step times that differ little from the mean count as
the mean.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from penstock.cluster.rates import NOISE
from penstock.cluster.view import ReplicaView

TRUST_SECONDS = 3.0  # the age at which statistics count about a third, and the mean of the fleet the rest
# Weight of a second by which a prompt delays a running sequence, beside a second until a first token: the delay is
# spread over the tokens of that sequence. With 1, engines with many sequences get no long prompts: these queue at the
# others, and short outputs there come between two prompts.
DELAYED = 0.25
UNLIMITED = 1 << 60  # tokens, of a KV cache of unknown size

# Assumed while nothing has been measured: prompts count more than sequences.
UNMEASURED = (1e-4, 1e-2, 1e-4)  # prefill_seconds, step_seconds, row_seconds
_NOWHERE: Mapping[str, float] = MappingProxyType({})


class FleetMeans(NamedTuple):
    """Means over the engines that are ready, and how far their regions are. Engines of a region count as equally far,
    so that noise does not divide their requests."""

    running: float = 0.0
    waiting: float = 0.0
    backlog: float = 0.0
    usage: float = 0.0
    prefill: float = UNMEASURED[0]
    step: float = UNMEASURED[1]
    row: float = UNMEASURED[2]
    distances: Mapping[str, float] = _NOWHERE  # the shortest round trip in each region

    @classmethod
    def of(cls, replicas: Sequence[ReplicaView]) -> "FleetMeans":
        ready = [each for each in replicas if each.status == "ready"]
        if not ready:
            return cls()
        loads = [(each.running, each.waiting, each.backlog_tokens, each.kv_usage) for each in ready]
        measured = [each for each in ready if each.prefill_seconds > 0.0]
        times = [(each.prefill_seconds, each.step_seconds, each.row_seconds, each.measured) for each in measured]
        distances: dict[str, float] = {}
        for each in ready:
            distances[each.region] = min(each.round_trip, distances.get(each.region, math.inf))
        running, waiting, backlog, usage = _means(loads)
        prefill, step, row = _weighted(times) if times else UNMEASURED
        return cls(running, waiting, backlog, usage, prefill, step, row, distances)


class EngineCost(NamedTuple):
    """Seconds that a request costs at an engine: its own, and those by which it delays the sequences there."""

    name: str
    distance: float  # round trip to its region
    wait: float  # that, and until the prompts are computed that wait there
    places: float  # until a sequence has ended whose place it needs
    uncached_token: float  # for each prompt token that is not cached
    output_token: float
    free_tokens: float  # of the KV cache
    missing_token: float  # until so much memory is freed, for each token more than that
    recent_tokens: float  # computed there lately

    @classmethod
    def of(cls, replica: ReplicaView, means: FleetMeans) -> "EngineCost":
        running, waiting = float(replica.running), float(replica.waiting)
        backlog, usage = float(replica.backlog_tokens), replica.kv_usage
        if replica.stats_age > 0.0:  # the older they are, the less they count
            doubt = 1.0 - math.exp(-replica.stats_age / TRUST_SECONDS)
            running += doubt * (means.running - running)
            waiting += doubt * (means.waiting - waiting)
            backlog += doubt * (means.backlog - backlog)
            usage += doubt * (means.usage - usage)
        prefill, step, row = means.prefill, means.step, means.row
        if replica.prefill_seconds > 0.0:
            trust = replica.measured
            prefill = _steady(replica.prefill_seconds, prefill, trust)
            step, row = _steady(replica.step_seconds, step, trust), _steady(replica.row_seconds, row, trust)
        sequences = running + waiting + replica.booked_requests
        too_many = max(sequences + 1.0 - replica.max_num_seqs, 0.0)
        kv_tokens = replica.kv_tokens or UNLIMITED
        distance = means.distances.get(replica.region, replica.round_trip)
        return cls(
            replica.name,
            distance,
            wait=distance + (backlog + replica.booked_tokens) * prefill,
            places=too_many * replica.request_seconds / replica.max_num_seqs,
            uncached_token=prefill * (1.0 + DELAYED * sequences),
            output_token=step + row * (1.0 + 2.0 * sequences),
            free_tokens=kv_tokens * (1.0 - usage) - replica.booked_tokens,
            missing_token=replica.request_seconds / kv_tokens,
            recent_tokens=replica.recent_tokens + replica.booked_tokens,
        )


class FleetView(msgspec.Struct, frozen=True):
    """All engines that a front knows, and the cost of each. Names are unique. Made by `of`."""

    replicas: tuple[ReplicaView, ...] = ()
    costs: tuple[EngineCost, ...] = ()  # of these, in their order
    means: FleetMeans = FleetMeans()
    exchanges: bool = False  # engines read KV blocks from each other

    @classmethod
    def of(cls, replicas: Iterable[ReplicaView]) -> "FleetView":
        """Return the view of these engines."""
        replicas = tuple(replicas)
        means = FleetMeans.of(replicas)
        exchanges = any(each.role != "alone" for each in replicas)
        return cls(replicas, tuple([EngineCost.of(each, means) for each in replicas]), means, exchanges)

    def replica(self, name: str) -> ReplicaView | None:
        return next((replica for replica in self.replicas if replica.name == name), None)

    def changed(self, replicas: Iterable[tuple[int, ReplicaView]]) -> "FleetView":
        """Return the view with newer pictures of the engines at these places, and the means as before."""
        views, costs = list(self.replicas), list(self.costs)
        for place, replica in replicas:
            views[place], costs[place] = replica, EngineCost.of(replica, self.means)
        return FleetView(tuple(views), tuple(costs), self.means, self.exchanges)


def _means(rows: Sequence[tuple[float, ...]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _weighted(rows: Sequence[tuple[float, float, float, float]]) -> list[float]:
    """Return the means of the first three columns, weighted with the last one."""
    total = sum(row[3] for row in rows)
    return [sum(row[place] * row[3] for row in rows) / total for place in range(3)] if total else _means(rows)[:3]


def _steady(value: float, mean: float, trust: float) -> float:
    """Return the value as far as it is trusted; the mean if it differs from that by no more than measurements do."""
    value = mean + trust * (value - mean)
    return mean if abs(value - mean) <= NOISE * mean else value
