"""A replica: the production scheduler on a virtual clock, with steps that take what a cost model says.

Its loop makes the decisions of `engine.core.EngineCore` in the same order: read commands, drop late requests, plan as
far as the depth allows, apply the oldest result. `tests/simulate/test_replica.py` runs both on the same requests and
compares their plans. The engine's loop also serves a channel, grammars and operators, of which a simulation has none.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from penstock.engine.core import STATS_SECONDS
from penstock.engine.queue import RequestQueue
from penstock.messages import (
    Capacity,
    EngineRole,
    EngineStats,
    GenerateRequest,
    RequestRejected,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenDelta,
)
from penstock.schedule import Scheduler
from penstock.simulate.batching import BatchScheduler
from penstock.simulate.clock import NANO, EventClock
from penstock.simulate.costs.counter import StepCounter
from penstock.simulate.costs.work import StepCostModel
from penstock.simulate.traffic.request import SimulatedRequest

ReplicaState = Literal["starting", "ready", "draining", "dead"]
DropReason = Literal["refused", "late"]


class Machine:
    """The device, or the group of devices, that executes steps. Engines that share one wait for each other's steps."""

    def __init__(self) -> None:
        self.free_at = 0  # nanoseconds


class SimulatedReplica:
    """One engine. The simulation calls `step` when it is due. `in_flight` has the requests that were sent to it."""

    def __init__(
        self,
        name: str,
        group: str,
        model: str,
        region: str,
        scheduler: Scheduler | BatchScheduler,
        capacity: Capacity,
        cost: StepCostModel,
        machine: Machine,
        queue: RequestQueue,
        clock: EventClock,
        *,
        role: EngineRole = "alone",
        page_seconds: float = 0.0,
        step_tokens: int = 0,
        round_trip: float = 0.0,
        beside: dict[str, "SimulatedReplica"] | None = None,
        delay: float = 0.0,
    ) -> None:
        """`page_seconds`: for the KV blocks of a token to come from another replica. `step_tokens`: of a step, at
        most. `round_trip`: seconds from the router and back. `beside`: by name, the replicas with which it shares
        processors; it joins them. Each of their results delays its steps by `delay` seconds."""
        self.name, self.group, self.model, self.region = name, group, model, region
        self.scheduler, self.capacity, self.cost = scheduler, capacity, cost
        self.machine, self.queue, self.clock = machine, queue, clock
        self.role, self.page_seconds, self.step_tokens = role, page_seconds, step_tokens
        self.round_trip = round_trip
        self.batches = scheduler if isinstance(scheduler, BatchScheduler) else None
        self.state: ReplicaState = "ready"
        self.reachable = True  # from the router
        self.slowdown = 1.0  # times the seconds of a step
        self.stalled = False  # no further result comes
        self.watched = False  # a router reads `seen`
        self.seen = EngineStats()  # what the engine would have sent last: when the rows change, and every 50 ms
        self.in_flight: dict[int, SimulatedRequest] = {}
        self.waiting: dict[int, SimulatedRequest] = {}  # of those in flight, not begun
        self.uncached: dict[int, int] = {}  # prompt tokens of those without a first token, as the router expects them
        self.prefilling = 0  # all of these
        self.computing: dict[int, float] = {}  # those of them that have begun, and since when
        self.due: int | None = None  # nanoseconds of its next step
        self.busy = self.rows = 0  # nanoseconds, and rows x nanoseconds, of all steps so far
        self.counter = StepCounter()
        self.all_deltas = False  # `take` gets each delta; else only the first and the last of a sequence
        self.take: Callable[[SimulatedReplica, TokenDelta], None] = lambda replica, delta: None
        self.drop: Callable[[SimulatedReplica, int, DropReason], None] = lambda replica, number, reason: None
        self._beside, self._delay = {} if beside is None else beside, round(delay * NANO)
        self._beside[name] = self
        self._late = 0  # nanoseconds by which steps in progress take longer than planned
        self._inbox: list[GenerateRequest | str] = []  # new requests, and ids of aborted ones
        self._outstanding: deque[tuple[int, StepResult]] = deque()  # when each result comes
        self._tokens: dict[int, SequenceResult] = {}  # what a sequence samples, always
        self._results: tuple[SequenceResult, ...] = ()  # of the last plan
        self._mark = 0.0  # until when seconds were counted as those of a step
        self._step_seconds = self._stats_due = 0.0

    @property
    def slots(self) -> int:
        """The sequences that can run at a time."""
        return self.queue.most - self.queue.max_waiting

    @property
    def computes(self) -> bool:
        """True while the result of a step is awaited. As in production, commands are read after it."""
        return bool(self._outstanding)

    @property
    def kv_tokens(self) -> int:
        """The tokens that the KV cache holds; block 0 is the null page."""
        return (min(group.num_blocks for group in self.capacity.groups) - 1) * self.capacity.block_size

    # -- requests -------------------------------------------------------------------------------------------------

    def check(self, request: SimulatedRequest) -> None:
        """Raises QueueFull if the request would exceed the limits of the queue."""
        self.queue.running = self.scheduler.num_running
        self.queue.check(request.queued_tokens, request.priority)

    def book(self, request: SimulatedRequest, uncached: int) -> None:
        """Counts a request that is on its way, and the prompt tokens that are not cached here."""
        self.in_flight[request.number] = self.waiting[request.number] = request
        self.queue.join(request.queued_tokens)
        self.uncached[request.number] = uncached
        self.prefilling += uncached

    def answered(self, number: int) -> None:
        """Notes that a request has its first token, or has left without one."""
        self.prefilling -= self.uncached.pop(number, 0)
        self.computing.pop(number, None)

    def receive(self, message: GenerateRequest) -> None:
        """Takes a request. The engine reads it between two steps."""
        self._inbox.append(message)

    def abort(self, request: SimulatedRequest) -> None:
        """Ends a request."""
        self._inbox.append(str(request.number))
        self.gone(request)

    def gone(self, request: SimulatedRequest) -> None:
        """Notes that a request is no longer in flight here."""
        self.in_flight.pop(request.number, None)
        self.answered(request.number)
        if self.waiting.pop(request.number, None) is not None:
            self.queue.leave(request.queued_tokens, started=False)

    def take_blocks(self, source: "SimulatedReplica", request: SimulatedRequest) -> None:
        """Puts the blocks of a prompt that another replica has into the prefix cache, as far as there is room."""
        if not (isinstance(self.scheduler, Scheduler) and isinstance(source.scheduler, Scheduler)):
            return
        leases, there, blocks = self.scheduler.leases, source.scheduler.leases, []
        for key in leases.keys(request.message()):
            if not (there.cached(key) and leases.spare):
                break
            if not leases.cached(key):
                blocks.append(leases.reserve())
                leases.publish(blocks[-1], key)
        leases.give_back(blocks[::-1])

    # -- the engine's loop ----------------------------------------------------------------------------------------

    def step(self) -> int | None:
        """Runs the engine's loop until it waits. Returns until when, in nanoseconds; None: until a request comes."""
        if self._late:
            self._extend()
        scheduler, outstanding, clock = self.scheduler, self._outstanding, self.clock
        ns, now, depth = clock.ns, clock.now, self.capacity.depth
        if not outstanding:
            self._mark = now  # the engine was asleep
        while True:
            if outstanding and outstanding[0][0] <= ns and not self.stalled:
                self._step_seconds += now - self._mark
                self._mark = now
                result = outstanding.popleft()[1]
                if self._delay:
                    self._delay_others()
                all_deltas = self.all_deltas
                for delta in scheduler.apply(result, now):
                    if all_deltas or delta.finish_reason is not None or not delta.offset:
                        self.take(self, delta)
            if self._inbox:
                self._read(now)
            for request_id, _ in scheduler.drop_late(now):
                self.drop(self, int(request_id), "late")
            while len(outstanding) < depth and (plan := scheduler.plan(now)) is not None:
                self._submit(plan)
            if not outstanding or outstanding[0][0] > ns or self.stalled:
                break
        if self.watched and (now >= self._stats_due or scheduler.num_running != self.seen.running):
            self._stats_due = now + STATS_SECONDS
            self.seen = scheduler.stats(self._step_seconds)
        if outstanding:
            return None if self.stalled else outstanding[0][0]
        due = None if self.batches is None else self.batches.due()
        return None if due is None else round(due * NANO)

    def _delay_others(self) -> None:
        for other in self._beside.values():
            if other.computes and other is not self:
                other._late += other._delay

    def _extend(self) -> None:
        late, self._late = self._late, 0
        for place, (end, result) in enumerate(self._outstanding):
            self._outstanding[place] = end + late, result
        self.machine.free_at += late
        self.busy += late
        self.rows += late * len(self._results)

    def _read(self, now: float) -> None:
        """Aborts requests, then adds the new ones: the engine admits requests after it has read all commands."""
        messages, self._inbox = self._inbox, []
        new: dict[str, GenerateRequest] = {}
        for message in messages:
            if isinstance(message, GenerateRequest):
                new[message.request_id] = message
            elif new.pop(message, None) is None:
                self.scheduler.abort(message, now)
        for request_id, message in new.items():
            try:
                deltas = self.scheduler.add(message, now)
            except RequestRejected:
                self.drop(self, int(request_id), "refused")
            else:
                for delta in deltas:
                    self.take(self, delta)

    def _submit(self, plan: StepPlan) -> None:
        work = self.counter.count(plan)
        if plan.new:
            for request_id in self.scheduler.begun(plan):
                number = int(request_id)
                if number in self.uncached:
                    self.computing[number] = self.clock.now
                request = self.waiting.pop(number, None)
                if request is not None:
                    self.queue.leave(request.queued_tokens, started=True)
        if not self.counter.repeated:
            tokens = self._tokens
            for seq in plan.gone:
                del tokens[seq]
            for new in plan.new:
                tokens[new.seq] = SequenceResult(new.seq, (new.sampling.seed,))
            self._results = tuple([tokens[each.seq] if each.sample else SequenceResult(each.seq) for each in plan.work])
        took, machine, begin = round(self.cost.seconds(work) * self.slowdown * NANO), self.machine, self.clock.ns
        if begin < machine.free_at:
            begin = machine.free_at
        occupied = took // self.cost.stages
        machine.free_at = begin + occupied
        self.busy += occupied
        self.rows += occupied * (len(plan.work) if self.batches is None else self.batches.useful_rows)
        self._outstanding.append((begin + took, StepResult(plan.plan_id, self._results)))


class Routed(NamedTuple):
    """The replica of a request, and one whose KV blocks it reads before: see cluster.route.RouteChoice."""

    replica: SimulatedReplica
    uncached: int  # prompt tokens that are to be computed
    source: SimulatedReplica | None = None
    computes: bool = False
