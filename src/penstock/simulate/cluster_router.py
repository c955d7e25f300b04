"""The production router in a simulation: its index of blocks, its measured rates, and `choose`.

`cluster.replica.Replica` keeps the same for real engines, around their asyncio clients.
"""

from collections import deque
from collections.abc import Sequence

from penstock.cluster.costs import FleetView
from penstock.cluster.index import BlockIndex
from penstock.cluster.rates import StepRates
from penstock.cluster.replica import HALF_LIFE, STATS_SECONDS
from penstock.cluster.route import choose
from penstock.cluster.view import ReplicaView, RouteRequest
from penstock.messages import BlockKeys, EngineStats
from penstock.schedule import Scheduler
from penstock.simulate.replica import Routed, SimulatedReplica
from penstock.simulate.traffic.request import SimulatedRequest


class _KnownReplica:
    """What a front knows of one replica."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self.replica = replica
        self.kv_tokens = replica.kv_tokens
        self.rates = StepRates()
        self.stats = EngineStats()
        self.stats_at = self.kv_usage = 0.0
        self.sent: deque[tuple[float, int]] = deque()  # when requests were sent, and their numbers
        self.recent, self.recent_at = 0.0, 0.0

    def send(self, number: int, uncached: int, now: float) -> None:
        """Counts a request that is sent."""
        self.sent.append((now, number))
        self.recent = self.faded(now) + uncached
        self.recent_at = now

    def look(self, now: float) -> bool:
        """Takes the statistics that the replica has sent. Returns True if they are new."""
        stats = self.replica.seen
        new = stats is not self.stats
        if new:
            self.stats, self.stats_at, self.kv_usage = stats, now, stats.kv_usage
            self.rates.observe(stats)
        while self.sent and self.sent[0][0] < self.stats_at - STATS_SECONDS:
            self.sent.popleft()
        return new

    def faded(self, now: float) -> float:
        return float(self.recent * 0.5 ** ((now - self.recent_at) / HALF_LIFE))

    def view(self, now: float) -> ReplicaView:
        replica, stats, rates = self.replica, self.stats, self.rates
        booked = [replica.uncached[number] for _, number in self.sent if number in replica.uncached]
        begun = sum([replica.uncached[number] for number in replica.computing])
        left = replica.prefilling - rates.computed(begun, replica.step_tokens, replica.computing.values(), now)
        tokens = min(sum(booked), left)
        return ReplicaView(
            name=replica.name,
            role=replica.role,
            region=replica.region,
            round_trip=replica.round_trip,
            max_num_seqs=replica.slots,
            max_model_len=2**31,
            kv_tokens=self.kv_tokens,
            running=stats.running,
            waiting=stats.waiting,
            backlog_tokens=left - tokens,
            kv_usage=self.kv_usage,
            prefill_seconds=rates.prefill_seconds,
            step_seconds=rates.step_seconds,
            row_seconds=rates.row_seconds,
            measured=rates.trust,
            request_seconds=128 * (rates.step_seconds + rates.row_seconds * max(stats.running, 1)),
            booked_requests=len(booked),
            booked_tokens=tokens,
            recent_tokens=self.faded(now),
        )


class ClusterRouter:
    """Chooses as a front of `penstock serve --engines` does."""

    def __init__(self, seed: int) -> None:
        self._seed = seed << 32
        self._index = BlockIndex()
        self._known: dict[str, _KnownReplica] = {}
        self._chains: dict[str, tuple[BlockKeys, bytes]] = {}

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> Routed:
        """See SimulatedRouter."""
        views = tuple([self._view(replica, now) for replica in replicas])
        size = replicas[0].capacity.block_size
        keys = self._keys(request, replicas[0])
        cached = {name: count * size for name, count in self._index.match(keys, now).items()}
        self._seed += 1
        asked = RouteRequest(prompt_tokens=request.prompt_tokens, max_tokens=request.output, cached=cached)
        choice = choose(FleetView.of(views), asked, self._seed)
        name, source = choice.replicas[0], self._known.get(choice.source)
        known, uncached = self._known[name], request.prompt_tokens - cached.get(name, 0)
        self._index.book(name, keys, now)
        if source is None:
            known.send(request.number, uncached, now)
            return Routed(known.replica, uncached)
        known.send(request.number, 0, now)
        if choice.computes:
            uncached = request.prompt_tokens - cached.get(choice.source, 0)
            self._index.book(choice.source, keys, now)
            source.send(-request.number, uncached, now)
        return Routed(known.replica, uncached, source.replica, choice.computes)

    def _keys(self, request: SimulatedRequest, replica: SimulatedReplica) -> list[bytes]:
        size, weights = replica.capacity.block_size, replica.capacity.identity.weights
        if weights not in self._chains:
            chain = BlockKeys(size, weights)
            self._chains[weights] = chain, chain.root("")
        chain, root = self._chains[weights]
        keys: list[bytes] = []
        chain.extend_packed(keys, root, request.packed_prompt)
        return keys

    def _view(self, replica: SimulatedReplica, now: float) -> ReplicaView:
        known = self._known.get(replica.name)
        scheduler = replica.scheduler if isinstance(replica.scheduler, Scheduler) else None
        if known is None or known.replica is not replica:  # a new one, or started again
            known = self._known[replica.name] = _KnownReplica(replica)
            replica.watched = True
            self._index.join(replica.name, 0)
            if scheduler is not None:
                scheduler.watch_blocks()
        if known.look(now) and scheduler is not None and (changes := scheduler.block_changes()) is not None:
            self._index.apply(replica.name, 0, changes)
        return known.view(now)
