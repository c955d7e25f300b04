"""A client of several engines. It chooses the engine of each request, and goes on elsewhere when an engine ends."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import partial

from penstock.cluster.replica import FleetEngine, Replica
from penstock.cluster.requests import HOLD_SECONDS, FleetRequests
from penstock.cluster.route import Route, choose
from penstock.cluster.totals import FleetQueue, common_info, total_answer, total_stats
from penstock.messages import (
    BlockChanges,
    Clock,
    ControlAnswer,
    ControlMessage,
    DeadlineExceeded,
    EngineError,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineStatus,
    FinishReason,
    GenerateRequest,
    QueueFull,
    RequestRejected,
    TokenDelta,
    WatchBlocks,
)
from penstock.tasks import spawn

TICK_SECONDS = 0.25  # between looks at engines that may hang, and at requests that are held

log = logging.getLogger(__name__)


class FleetClient:
    """messages.EngineClient over several engines, which join and leave. Used from one event loop.

    While no engine can take a request, it is held. A request that has tokens goes on token-exactly on any engine of
    its pool, those with equal weights and numerics.
    """

    def __init__(
        self,
        route: Route = choose,
        *,
        clock: Clock,
        front: str = "",
        seed: int | None = None,
        move_anywhere: bool = False,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """`route` chooses engines; `seed` is the first that it gets, by default a random one. A
        request waits for `hold_seconds` for an engine that can take it. See Placing for the others."""
        self.clock = clock
        self.front = front or secrets.token_hex(4)
        self._replicas: dict[str, Replica] = {}
        self._requests = FleetRequests(
            self._replicas,
            route,
            clock,
            front=self.front,
            seed=secrets.randbits(48) if seed is None else seed,
            move_anywhere=move_anywhere,
            hold_seconds=hold_seconds,
        )
        self._info: EngineInfo | None = None
        self._state = EngineState("restarting")
        self._totals: tuple[tuple[EngineStats, ...], EngineStats] = ((), EngineStats())  # (engines', their sum)
        self._left = EngineStats()  # the counts of engines that have left
        self._restarts = 0  # of those
        self._on_change: Callable[[], None] = lambda: None
        self._asking: set[asyncio.Task[None]] = set()  # for reports of blocks
        self._keeping: set[asyncio.Task[None]] = set()  # what lets engines join and leave
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self.queue = FleetQueue(self._replicas)

    # -- messages.EngineClient ------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Facts and limits of the engines that are ready, or were last. Raises EngineError before one has joined."""
        if self._info is None:
            raise EngineError("no engine of the fleet has been ready yet")
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    def stats(self) -> EngineStats:
        now = tuple([replica.engine.stats() for replica in self._replicas.values()])
        before = self._totals[0]
        if len(now) != len(before) or any(new is not old for new, old in zip(now, before, strict=True)):
            self._totals = now, total_stats([self._left, *now])
        return self._totals[1]

    async def generate(self, request: GenerateRequest, gather: int = 1) -> AsyncGenerator[TokenDelta, None]:
        """Deltas until every choice has finished, see messages.EngineClient. Closing it early aborts the request."""
        requests = self._requests
        try:
            stream = requests.open(request, gather)
        except QueueFull:
            self.queue.refused += 1
            raise
        timers = stream.record.watch_deadlines(self.clock(), self._loop.call_later, stream.collect)
        try:
            while deltas := await stream.read():
                for delta in deltas:
                    yield delta
        except DeadlineExceeded:
            self.queue.late += 1
            raise
        finally:
            for timer in timers:
                timer.cancel()
            requests.end(stream)

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int) -> None:
        self._requests.finish(request_id, choice, reason, keep)

    def abort(self, request_id: str) -> None:
        self._requests.abort(request_id)

    async def control(self, message: ControlMessage) -> ControlAnswer:
        """Execute an operator's message on every engine. Raises the first error."""
        if self._requests.failure:
            raise EngineError(self._requests.failure)
        engines = [replica.engine for replica in self._replicas.values() if replica.status != "gone"]
        if not engines:
            raise EngineError("the fleet has no engine now: try again in a few seconds")
        return total_answer(await asyncio.gather(*(engine.control(message) for engine in engines)))

    async def close(self) -> None:
        """Close all engines. Streams still open end with EngineError. May be called twice."""
        self._timer.cancel()
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self._requests.fail_all("the engine is closed")
        self._refresh()
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas.values()))

    # -- engines --------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Return when an engine has joined, so that `info` is known."""
        await self._ready.wait()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._replicas.values())

    @property
    def moves(self) -> Mapping[str, int]:
        """Requests that had to move, by what their engine did."""
        return self._requests.moves

    @property
    def held(self) -> int:
        """Requests that wait for an engine that can take them."""
        return self._requests.held

    @property
    def idle(self) -> bool:
        """True while no request is open."""
        return self._requests.idle

    def on_change(self, call: Callable[[], None]) -> None:
        """Let `call` be called when `state` has changed."""
        self._on_change = call

    def join(self, name: str, engine: FleetEngine, host: str = "127.0.0.1") -> Replica:
        """Add an engine that is ready, which `close` closes. Other engines reach it at `host`. Raises EngineError for a
        name in use, and for another vocabulary."""
        if name in self._replicas:
            raise EngineError(f"engine {name} has joined already")
        first, info = self._info, engine.info
        if first is not None and (first.vocab_size, first.eos_token_ids) != (info.vocab_size, info.eos_token_ids):
            raise EngineError(
                f"engine {name} serves {info.model} with {info.vocab_size} tokens, and this fleet serves {first.model} "
                f"with {first.vocab_size}: start it with the same model"
            )
        replica = self._replicas[name] = Replica(name, engine, self.clock(), host)
        engine.on_change(partial(self._engine_changed, replica))
        engine.on_blocks(partial(self._blocks_changed, replica))
        self._engine_changed(replica)
        return replica

    def leave(self, name: str) -> None:
        """Remove an engine, which the caller closes. Its requests go on elsewhere."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self._left = total_stats([self._left, replica.engine.stats().ended()])
            self._restarts += replica.engine.state.restarts
            self._requests.placing.index.leave(name)
            self._requests.move(replica, "ended")
            self._refresh()

    def keep(self, keeping: Coroutine[None, None, None]) -> None:
        """Run what lets engines join and leave, until `close`."""

        async def run() -> None:
            try:
                await keeping
            except Exception:
                log.exception("engines can no longer join or leave, since what keeps them has failed")

        self._keeping.add(self._loop.create_task(run()))

    @property
    def expected(self) -> int | None:
        """How many engines there will be; None: unknown."""
        return self._requests.expected

    def drain(self, name: str, grace: float) -> None:
        """Send an engine no new requests. Those that it has may stay for `grace` seconds, and then go on elsewhere."""
        if (replica := self._replicas.get(name)) is not None and replica.leaves_at is None:
            replica.drain(grace, self.clock())

    def expect(self, count: int) -> None:
        """Note how many engines there will be. Requests wait for them; a fleet that shall have none is asleep."""
        if count != self._requests.expected:
            self._requests.expected = count
            self._refresh()

    def _engine_changed(self, replica: Replica) -> None:
        """Run when an engine's state has changed."""
        if self._replicas.get(replica.name) is not replica:
            return
        replica.changed(self.clock())
        if replica.status == "gone":
            replica.gone.set()
        if replica.status in ("starting", "gone"):
            self._requests.move(replica, "ended")
        elif replica.incarnation != replica.engine.info.incarnation:
            replica.incarnation, replica.hung = replica.engine.info.incarnation, False
            self._requests.placing.index.join(replica.name, replica.incarnation)
            self._ask_for_blocks(replica)
        self._refresh()
        self._requests.place_held()

    def _blocks_changed(self, replica: Replica, changes: BlockChanges) -> None:
        if not self._requests.placing.index.apply(replica.name, replica.incarnation, changes):
            self._ask_for_blocks(replica)

    def _ask_for_blocks(self, replica: Replica) -> None:
        """Ask an engine to report its blocks, beginning with all of them. The answer shows that it does not hang."""

        async def ask() -> None:
            try:
                await replica.engine.control(WatchBlocks())
            except (EngineError, RequestRejected) as error:
                log.debug("engine %s does not report its blocks: %s", replica.name, error)
            else:
                replica.hung = False
                replica.changed(self.clock())

        spawn(self._asking, ask())

    def _refresh(self) -> None:
        """Bring `info` and `state` up to date."""
        here = [each.engine for each in self._replicas.values() if each.status not in ("starting", "gone")]
        if here:
            self._info = common_info([engine.info for engine in here])
            self._ready.set()
        status: EngineStatus = "restarting"
        if self._requests.failure:
            status = "ended"
        elif here:
            status = "asleep" if all(engine.state.status == "asleep" for engine in here) else "ready"
        elif self._requests.expected == 0:
            status = "asleep"
        restarts = sum(replica.engine.state.restarts for replica in self._replicas.values())
        before, self._state = self._state, EngineState(status, self._restarts + restarts)
        if self._state != before:
            self._on_change()

    # -- time -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        now = self.clock()
        for replica in list(self._replicas.values()):
            replica.look(now)
            if replica.leaves_at is not None and now >= replica.leaves_at:
                self._requests.move_if_possible(replica, "draining")
            elif seconds := replica.silent(now):
                if not replica.hung:
                    log.error("engine %s has made no step for %.1f s: its requests move", replica.name, seconds)
                    replica.hung = True
                    replica.changed(now)
                    self._ask_for_blocks(replica)
                self._requests.move_if_possible(replica, "hung")
        self._requests.place_held()
        self._requests.give_up_held()
