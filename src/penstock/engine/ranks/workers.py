"""The executor that runs a model in several processes, one for each of its ranks."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from penstock.config import EngineConfig, format_bytes
from penstock.engine.ranks.local import LocalRanks
from penstock.engine.ranks.sizes import RankSizes, size_model
from penstock.engine.ranks.supervision import Rank, Supervision
from penstock.engine.ranks.wire import Beat, Done, Execute, Hello, Loaded, Prepare, RankFailed, Report, Start, encode
from penstock.messages import Capacity, EngineError, Grammar, Identity, MemoryRow, SequenceResult, StepPlan, StepResult

TICK_SECONDS = 0.1  # between looks at the ranks while there is no news

log = logging.getLogger(__name__)


class Ranks(Protocol):
    """The processes of all ranks."""

    names: list[str]  # "rank 1 (pid 4711)"
    machines: list[str]  # each rank's: those with the same name share its memory and its processors
    host: str  # where the others find rank 0

    def connected(self) -> None:
        """Called when every rank has connected both of its sockets."""

    def send(self, rank: int, frame: bytes) -> None: ...
    def receive(self, seconds: float) -> list[tuple[int, Report]]:
        """Return (rank, report) of every report received. Blocks up to `seconds` for news."""

    def ended(self) -> dict[int, str]:
        """Return how the ranks that have ended did so, in words, by rank."""

    def close(self) -> None: ...


def start_ranks(config: EngineConfig) -> Ranks:
    """Start the ranks as `distributed_executor` says."""
    if config.distributed_executor == "ray":
        from penstock.engine.ranks.ray_cluster import RayRanks  # not above: Ray is optional

        return RayRanks(config)
    return LocalRanks(config.split.world)


class WorkersExecutor:
    """Sends every plan to all ranks and takes its result from the one that samples.

    As many plans may be outstanding as there are stages in the pipeline, and two at the least on GPUs. `start`,
    `result` and `health` raise EngineError when a rank ends, fails, falls silent or is stuck; the message says which,
    where and why. One thread calls.
    """

    result_at = 0.0  # `result` blocks

    def __init__(
        self,
        config: EngineConfig,
        ranks: Callable[[EngineConfig], Ranks] = start_ranks,
        size: Callable[[EngineConfig, Sequence[int]], RankSizes] = size_model,
    ) -> None:
        self._config = config
        self._start_ranks = ranks
        self._size = size
        self._places = config.split.places
        self._hellos: dict[int, Hello] = {}
        self._capacities: dict[int, Capacity] = {}
        self._results: deque[StepResult] = deque()
        self._learned: list[StepResult] = []  # results that came in since the last order
        self._outstanding = 0
        self._ranks: Ranks | None = None

    def start(self) -> Capacity:
        """Start the ranks and have them load. Raises what loading raises in this process, or EngineError."""
        self._ranks = ranks = self._start_ranks(self._config)
        self._states = [Rank(name) for name in ranks.names]
        self._supervision = Supervision(self._states, self._config.step_deadline, time.monotonic)
        self._wait_until(lambda: all(rank.greeted for rank in self._states))
        ranks.connected()
        machines = ranks.machines
        memory = [self._hellos[p.rank].memory_available // machines.count(machines[p.rank]) for p in self._places]
        sizes = self._size(self._config, memory)
        self._send_starts(ranks, sizes.num_blocks)
        self._wait_until(lambda: all(rank.loaded for rank in self._states))
        capacities = [self._capacities[place.rank] for place in self._places]
        for name, part, capacity in zip(ranks.names, sizes.parts, capacities, strict=True):
            table = ", ".join(f"{row.name} {format_bytes(row.bytes)}" for row in capacity.memory)
            log.info("%s has %s: %s", name, part, table)
        return combine(capacities, self._config.split.pipeline)

    def prepare(self, grammar: Grammar) -> bool:
        """Always True: the plan that needs the grammar waits on the rank that samples, if it comes first."""
        order = encode(Prepare(grammar))
        for place in self._places:
            if place.reports:
                self._started().send(place.rank, order)
        return True

    def submit(self, plan: StepPlan) -> None:
        order = encode(Execute(plan, tuple(self._learned)))
        self._learned.clear()
        ranks = self._started()
        for place in self._places:
            ranks.send(place.rank, order)
        self._outstanding += 1
        if self._outstanding == 1:
            self._supervision.advance()
            self._supervision.expect(1)

    def result(self) -> StepResult:
        if not (self._outstanding or self._results):
            raise RuntimeError("a result was requested, but no plan is outstanding")
        while not self._results:
            self._attend(TICK_SECONDS)
        result = self._results.popleft()
        self._learned.append(tokens_only(result))
        return result

    def recover(self, error: Exception) -> bool:
        """Always False: a rank that lacks memory has ended, and the others with it."""
        return False

    def trim(self, limits: Sequence[int]) -> None:
        """Never called: the cache of ranks is not resizable."""

    def health(self) -> None:
        self._attend(0.0)
        while self._supervision.troubled:
            self._attend(TICK_SECONDS)

    def close(self) -> None:
        """End every process, in any state. May be called at any time, also twice."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _started(self) -> Ranks:
        if self._ranks is None:
            raise RuntimeError("the executor has not been started, or is closed")
        return self._ranks

    def _send_starts(self, ranks: Ranks, num_blocks: tuple[int, ...]) -> None:
        rendezvous = f"{ranks.host}:{self._hellos[0].port}"
        for place, machine in zip(self._places, ranks.machines, strict=True):
            share = (ranks.machines[: place.rank].count(machine), ranks.machines.count(machine))
            ranks.send(place.rank, encode(Start(self._config, place.rank, rendezvous, num_blocks, share)))

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._attend(TICK_SECONDS)

    def _attend(self, seconds: float) -> None:
        """Process reports and ends, and block up to `seconds` for some. Raises EngineError when the engine must end."""
        ranks = self._started()
        reports = ranks.receive(seconds)
        self._supervision.advance()
        for rank, report in reports:
            self._take(rank, report)
        for rank, how in ranks.ended().items():
            self._states[rank].ended = how
        verdict = self._supervision.look()
        if verdict:
            raise EngineError(verdict)

    def _take(self, rank: int, report: Report) -> None:
        state = self._states[rank]
        self._supervision.hear(state)
        match report:
            case Beat():
                state.beat = report
            case Done():
                self._results.append(report.result)
                self._outstanding -= 1
                self._supervision.expect(self._outstanding)
            case Hello():
                self._hellos[rank] = report
            case Loaded():
                self._capacities[rank] = report.capacity
                state.loaded = True
            case RankFailed():
                state.failed = report
        state.greeted = rank in self._hellos and state.beat is not None


def tokens_only(result: StepResult) -> StepResult:
    """Return the part of a result that the other ranks need."""
    results = tuple(SequenceResult(r.seq, r.token_ids, error=r.error) for r in result.results if r.token_ids or r.error)
    return StepResult(result.plan_id, results)


def combine(capacities: Sequence[Capacity], stages: int) -> Capacity:
    """Return the capacity of all ranks together. Raises RuntimeError when they differ in what must be equal."""
    agreed = {(capacity.block_size, capacity.groups, capacity.vocab_size) for capacity in capacities}
    if len(agreed) > 1:
        raise RuntimeError(f"the ranks do not agree on (block size, KV groups, vocabulary): {sorted(agreed, key=repr)}")
    rows: dict[str, int] = {}
    for capacity in capacities:
        for row in capacity.memory:
            rows[row.name] = rows.get(row.name, 0) + row.bytes
    return msgspec.structs.replace(
        capacities[0],
        depth=max(stages, capacities[0].depth),
        late_ids=stages == 1,
        exact_drafts=all(capacity.exact_drafts for capacity in capacities),
        identity=Identity(
            capacities[0].identity.weights,  # the first rank alone has read all weights
            json.dumps([capacity.identity.numerics for capacity in capacities]),
        ),
        memory=tuple(MemoryRow(name, size, f"of {len(capacities)} ranks") for name, size in rows.items()),
    )
