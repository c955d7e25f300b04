"""The series of a server that has several engines: one value for each engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from penstock.messages import EngineStats
from penstock.observe.series import counter_of

STATUSES = ("ready", "starting", "suspect", "draining", "gone")


class MeasuredReplica(Protocol):
    """An engine of a fleet, as metrics read it."""

    name: str
    requests: int
    moved: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def status(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def round_trip(self) -> float: ...
    @property
    def open_requests(self) -> int: ...
    @property
    def stats(self) -> EngineStats: ...


class MeasuredFleet(Protocol):
    """A client of several engines, as metrics read it."""

    @property
    def replicas(self) -> Sequence[MeasuredReplica]: ...
    @property
    def moves(self) -> Mapping[str, int]: ...
    @property
    def held(self) -> int: ...
    @property
    def expected(self) -> int | None: ...


_GAUGES: tuple[tuple[str, str, Callable[[MeasuredReplica], float]], ...] = (
    ("replica_requests_open", "Requests of this server at the engine.", lambda replica: replica.open_requests),
    ("replica_requests_running", "Sequences in the engine's batch, of all servers.", lambda each: each.stats.running),
    ("replica_requests_waiting", "Requests that wait at the engine, of all servers.", lambda each: each.stats.waiting),
    ("replica_kv_cache_usage", "Share of the engine's KV blocks held by requests.", lambda each: each.stats.kv_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[MeasuredReplica], float]], ...] = (
    ("replica_requests", "Requests sent to the engine.", lambda replica: replica.requests),
    ("replica_requests_moved", "Requests that had to go on at another engine.", lambda replica: replica.moved),
    ("replica_prompt_tokens", "Prompt tokens of requests sent to the engine.", lambda replica: replica.prompt_tokens),
    (
        "replica_expected_cached_tokens",
        "Of these, tokens that its prefix cache was expected to have.",
        lambda replica: replica.cached_tokens,
    ),
)


class FleetSeries:
    def __init__(self, registry: CollectorRegistry, fleet: MeasuredFleet) -> None:
        self._fleet = fleet
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()  # names are checked at the scrape

    def collect(self) -> Iterator[Metric]:
        replicas = self._fleet.replicas
        text = "1 for the status that the engine has, else 0."
        states = GaugeMetricFamily("penstock_replica_status", text, labels=["replica", "status"])
        for replica in replicas:
            for status in STATUSES:
                states.add_metric([replica.name, status], float(replica.status == status))
        yield states
        text = "Seconds to the engine's machine and back, as measured in the last seconds."
        trips = GaugeMetricFamily("penstock_replica_round_trip_seconds", text, labels=["replica", "region"])
        for replica in replicas:
            trips.add_metric([replica.name, replica.region], replica.round_trip)
        yield trips
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"penstock_{name}", text, labels=["replica"])
            for replica in replicas:
                gauge.add_metric([replica.name], value(replica))
            yield gauge
        for name, text, value in _COUNTERS:
            counts = {replica.name: value(replica) for replica in replicas}
            yield counter_of(f"penstock_{name}", text, ["replica"], counts)
        text = "Requests that went on at another engine, by what theirs did."
        yield counter_of("penstock_fleet_moves", text, ["reason"], self._fleet.moves)
        if (wanted := self._fleet.expected) is not None:
            text = "Engines that there should be, with --replicas MIN:MAX."
            yield GaugeMetricFamily("penstock_fleet_replicas_wanted", text, value=wanted)
        text = "Requests that wait because no engine can take them now."
        yield GaugeMetricFamily("penstock_fleet_requests_held", text, value=self._fleet.held)
