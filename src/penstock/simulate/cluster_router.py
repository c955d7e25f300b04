"""The production router in a simulation: its index of blocks, its measured rates, and `choose`.

`cluster.replica.Replica` keeps the same for real engines, around their asyncio clients.
"""

from collections import deque
from collections.abc import Sequence

from penstock.cluster.index import BlockIndex
from penstock.cluster.rates import StepRates
from penstock.cluster.route import choose
from penstock.cluster.view import FleetView, ReplicaView, RouteRequest
from penstock.messages import BlockKeys, EngineStats
from penstock.schedule import Scheduler
from penstock.simulate.replica import SimulatedReplica
from penstock.simulate.traffic.request import SimulatedRequest, expand

STATS_SECONDS = 0.06  # as in cluster.replica: what was sent less long before statistics is not in them
HALF_LIFE = 300.0  # as there


class _KnownReplica:
    """What a front knows of one replica."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self.rates = StepRates()
        self.stats = EngineStats()
        self.stats_at = 0.0
        self.sent: deque[tuple[float, int]] = deque()  # when requests were sent, and their uncached tokens
        self.recent, self.recent_at = 0.0, 0.0
        self.replica = replica


class ClusterRouter:
    """Chooses as a front of `penstock serve --engines` does."""

    def __init__(self, seed: int) -> None:
        self._seed = seed << 32
        self._index = BlockIndex()
        self._seen: dict[str, _KnownReplica] = {}
        self._keys: dict[str, tuple[BlockKeys, bytes]] = {}

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now: float) -> SimulatedReplica:
        """See SimulatedRouter."""
        views = tuple([self._view(replica, now) for replica in replicas])
        keys = self._block_keys(request, replicas[0])
        size = replicas[0].block_size
        cached = {name: count * size for name, count in self._index.match(keys, now).items()}
        self._seed += 1
        asked = RouteRequest(prompt_tokens=request.prompt_tokens, max_tokens=request.output, cached=cached)
        name = choose(FleetView(views), asked, self._seed).replicas[0]
        best = next(replica for replica in replicas if replica.name == name)
        self._index.book(name, keys, now)
        seen, uncached = self._seen[name], request.prompt_tokens - cached.get(name, 0)
        seen.sent.append((now, uncached))
        seen.recent = seen.recent * 0.5 ** ((now - seen.recent_at) / HALF_LIFE) + uncached
        seen.recent_at = now
        return best

    def _block_keys(self, request: SimulatedRequest, replica: SimulatedReplica) -> list[bytes]:
        weights = replica.executor.capacity.identity.weights
        if weights not in self._keys:
            made = BlockKeys(replica.block_size, weights)
            self._keys[weights] = made, made.root("")
        made, root = self._keys[weights]
        keys: list[bytes] = []
        made.extend(keys, root, expand(request.prompt), request.prompt_tokens // replica.block_size)
        return keys

    def _view(self, replica: SimulatedReplica, now: float) -> ReplicaView:
        seen = self._seen.get(replica.name)
        if seen is None or seen.replica is not replica:
            seen = self._join(replica)
        if replica.seen is not seen.stats:
            seen.stats, seen.stats_at = replica.seen, now
            seen.rates.observe(seen.stats)
            self._report(replica)
        while seen.sent and seen.sent[0][0] < seen.stats_at - STATS_SECONDS:
            seen.sent.popleft()
        stats, rates = seen.stats, seen.rates
        booked = sum(tokens for _, tokens in seen.sent)
        waiting = sum(request.prompt_tokens for request in replica.waiting.values())
        capacity = replica.executor.capacity
        return ReplicaView(
            name=replica.name,
            model=replica.model,
            region=replica.region,
            max_num_seqs=replica.slots,
            max_model_len=2**31,
            kv_tokens=(min(group.num_blocks for group in capacity.groups) - 1) * capacity.block_size,
            running=stats.running,
            waiting=stats.waiting,
            backlog_tokens=max(waiting - booked, 0),
            kv_usage=stats.kv_usage,
            prefill_seconds=rates.prefill_seconds,
            step_seconds=rates.step_seconds,
            row_seconds=rates.row_seconds,
            request_seconds=128 * (rates.step_seconds + rates.row_seconds * max(stats.running, 1)),
            booked_requests=len(seen.sent),
            booked_tokens=booked,
            recent_tokens=seen.recent * 0.5 ** ((now - seen.recent_at) / HALF_LIFE),
        )

    def _join(self, replica: SimulatedReplica) -> _KnownReplica:
        """Begins anew with a replica."""
        if isinstance(replica.scheduler, Scheduler):
            replica.scheduler.watch_blocks()
        self._index.join(replica.name, 0)
        self._seen[replica.name] = _KnownReplica(replica)
        return self._seen[replica.name]

    def _report(self, replica: SimulatedReplica) -> None:
        """Takes the blocks that a replica has stored and removed."""
        if isinstance(replica.scheduler, Scheduler) and (changes := replica.scheduler.block_changes()) is not None:
            self._index.apply(replica.name, 0, changes)
