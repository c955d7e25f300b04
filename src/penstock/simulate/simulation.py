"""One heap of events in integer nanoseconds: requests come, replicas step, faults strike."""

import gc
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from typing import Any

from penstock.messages import GenerateRequest, QueueFull, TokenDelta
from penstock.simulate.clock import NANO, EventClock
from penstock.simulate.records import Outcome, RequestRecord, RequestStatus, Sample
from penstock.simulate.replica import SimulatedReplica
from penstock.simulate.routing import SimulatedRouter
from penstock.simulate.traffic.request import SimulatedRequest
from penstock.simulate.traffic.workload import MAX_REQUESTS, TrafficSource

MOST_MOVES = 3  # of a request whose replicas end; after that it fails
LOOK_SECONDS = 1.0  # until a request that finds no replica looks again
HOLD_SECONDS = 60.0  # for which it does, before it fails
SAMPLES = 240  # over the duration
TICK_SECONDS = 15.0  # between samples, if the duration is not known
COLLECTION_OBJECTS = 100_000  # new ones, until Python looks for cycles among them
FOREVER = 2**62  # nanoseconds: a century and a half

Handler = Callable[..., None]


@dataclass(frozen=True)
class ReplicaPlan:
    """How a replica is made, and what it costs."""

    make: Callable[[], SimulatedReplica]  # returns a new one, empty
    price: float  # of one device for an hour
    devices: int  # of its machine
    share: float  # of the machine that it pays for
    start_seconds: float  # from its order until it is ready


class Simulation:
    """Runs replicas, a router and traffic. Faults and tests schedule their own events with `at`."""

    def __init__(
        self,
        plans: Mapping[str, ReplicaPlan],
        router: SimulatedRouter,
        traffics: Sequence[TrafficSource],
        clock: EventClock,
        *,
        duration: float,
        drain: float,
        front_seconds: float = 0.0,
        tracks: bool = False,
    ) -> None:
        """`plans`: the replicas by name. Traffic comes for `duration` seconds, and `drain` seconds later all that is
        still open stays so; with a duration of 0, a simulation runs until its traces have ended. A request reaches its
        replica `front_seconds` after it came. `tracks`: count each token, so that a request can go on elsewhere."""
        self.clock, self.plans = clock, plans
        self.outcome = Outcome()
        self.replicas: dict[str, SimulatedReplica] = {}
        self._records: dict[int, RequestRecord] = {}
        self._router, self._traffics = router, {each.spec.name: each for each in traffics}
        self._front = front_seconds
        self._least = round(duration * NANO)
        self._end = round((duration + drain) * NANO) if duration else FOREVER
        self._tick = max(round(duration * NANO) // SAMPLES, 1) if duration else round(TICK_SECONDS * NANO)
        self._tracks = tracks
        self._heap: list[tuple[int, int, Handler, tuple[Any, ...]]] = []
        self._order = 0
        self._paid: dict[str, int] = {}  # since when a replica that is paid for was last counted
        self._sampled = (0, 0, 0)  # busy, rows and paid nanoseconds at the last sample
        self._busy = self._rows = 0  # of replicas that have ended
        self._pending = 0  # requests that have not ended, and those whose arrival is scheduled
        self.arrived_tokens = 0  # of prompts and outputs of all requests so far
        self.held = 0  # requests that wait for a replica that can take them

    # -- events -----------------------------------------------------------------------------------------------

    def at(self, ns: int, handler: Handler, *arguments: object) -> None:
        """Calls `handler` with the arguments at a time, not before now. Events of equal times run in the order in which
        they were scheduled."""
        self._order += 1
        heapq.heappush(self._heap, (max(ns, self.clock.ns), self._order, handler, arguments))

    def later(self, seconds: float, handler: Handler, *arguments: object) -> None:
        """Calls `handler` with the arguments after some seconds."""
        self.at(self.clock.ns + round(seconds * NANO), handler, *arguments)

    def say(self, what: str) -> None:
        """Adds a line to the timeline."""
        self.outcome.timeline.append((self.clock.now, what))

    def run(self, progress: Callable[[float], None] = lambda seconds: None) -> Outcome:
        """Runs until everything has ended. `progress` gets the virtual time now and then."""
        with _few_collections():
            self._run(progress)
        self._finish()
        return self.outcome

    def _run(self, progress: Callable[[float], None]) -> None:
        for traffic in self._traffics.values():
            self._next_arrival(traffic.requests())
        self.at(self._tick, self._sample)
        heap, pop, clock, least, end, events = self._heap, heapq.heappop, self.clock, self._least, self._end, 0
        while heap and (self._pending or heap[0][0] <= least):
            ns, _, handler, arguments = pop(heap)
            if ns > end:
                clock.set(end)
                break
            clock.ns, clock.now = ns, ns / NANO
            handler(*arguments)
            events += 1
            if not events & 0x3FFF:
                progress(clock.now)

    # -- requests ---------------------------------------------------------------------------------------------

    def _next_arrival(self, requests: Iterator[SimulatedRequest], arrived: SimulatedRequest | None = None) -> None:
        """Schedules the next request of an open stream, so that only one is held at a time. Then one arrives."""
        request = next(requests, None)
        if request is not None:
            self._pending += 1
            self.at(request.at, self._next_arrival, requests, request)
        if arrived is not None:
            self.arrive(arrived)

    def arrive(self, request: SimulatedRequest) -> None:
        """A request comes."""
        if len(self._records) >= MAX_REQUESTS:
            raise ValueError(f"the traffic has more than {MAX_REQUESTS} requests: shorten it, or lower its rate")
        record = RequestRecord(request.number, request.traffic, request.at, request.prompt_tokens, request.output)
        self._records[request.number] = record
        self.outcome.requests.append(record)
        self.arrived_tokens += request.prompt_tokens + request.output
        if request.timeout:
            self.later(request.timeout, self._deadline, request, False)
        if request.first_token_timeout:
            self.later(request.first_token_timeout, self._deadline, request, True)
        self.route(request)

    def route(self, request: SimulatedRequest, held: float = 0.0) -> None:
        """Sends a request to a replica. It is refused if the replica's queue is full, and held while there is no
        replica: for `held` seconds so far."""
        record = self._records[request.number]
        self.held -= held > 0.0
        if record.status != "open":
            return
        able = [replica for replica in self.replicas.values() if self._takes(replica, request)]
        if not able:
            if held >= HOLD_SECONDS:
                self._close(request, "failed")
            else:
                self.held += 1
                self.later(LOOK_SECONDS, self.route, request, held + LOOK_SECONDS)
            return
        routed = self._router.choose(request, able, self.clock.now)
        replica = routed.replica
        request.apart, request.awaits = routed.source is not None, routed.computes
        try:
            replica.check(request)
        except QueueFull:
            self._close(request, "refused")
            return
        record.replica = replica.name
        replica.book(request, routed.uncached if routed.source is None else 0)
        if routed.source is None:
            self._send(replica, request.message(record.sent))
        elif routed.computes:
            prefill = replace(request, number=-request.number, output=1, apart=False)
            routed.source.book(prefill, routed.uncached)
            self._send(routed.source, prefill.message())
        else:
            self._transfer(routed.source, request)

    def _send(self, replica: SimulatedReplica, message: GenerateRequest) -> None:
        if seconds := self._front + replica.round_trip:  # both ways: tokens are not delayed once more
            self.later(seconds, self._deliver, replica, message)
        else:
            self._deliver(replica, message)

    def _transfer(self, source: SimulatedReplica, request: SimulatedRequest) -> None:
        """Lets the blocks of a prompt come from the replica that has computed it. Those of earlier steps have come
        while the last one was computed."""
        replica = self.replicas.get(self._records[request.number].replica)
        if replica is not None:
            tokens = min(request.prompt_tokens, source.step_tokens)
            self.later(tokens * replica.page_seconds, self._transferred, source, replica, request)

    def _transferred(self, source: SimulatedReplica, replica: SimulatedReplica, request: SimulatedRequest) -> None:
        if request.number in replica.in_flight:  # else it has ended, or has moved
            replica.take_blocks(source, request)
            self._send(replica, request.message(self._records[request.number].sent))

    def _deliver(self, replica: SimulatedReplica, message: GenerateRequest) -> None:
        replica.receive(message)
        self._wake(replica)

    @staticmethod
    def _takes(replica: SimulatedReplica, request: SimulatedRequest) -> bool:
        allowed = not request.regions or replica.region in request.regions
        able = allowed and replica.state == "ready" and replica.reachable
        return able and request.model in ("", replica.model, replica.group)

    def move(self, request: SimulatedRequest) -> None:
        """Sends a request again, with the tokens that it has, after its replica has ended."""
        if request.number < 0:  # a prompt for another replica, which computes it now
            self._prefilled(None, request)
            return
        record = self._records[request.number]
        if record.status != "open":
            return
        record.moves += 1
        if record.moves > MOST_MOVES:
            self._close(request, "failed")
        else:
            self.route(request)

    def _deadline(self, request: SimulatedRequest, first: bool) -> None:
        record = self._records[request.number]
        if record.status != "open" or (first and record.first >= 0):
            return
        replica = self.replicas.get(record.replica)
        if replica is not None and request.number in replica.in_flight:
            replica.abort(request)
            self._wake(replica)
        self._close(request, "late")

    def _close(self, request: SimulatedRequest, status: RequestStatus) -> None:
        record = self._records[request.number]
        record.status, record.end = status, self.clock.ns
        self._pending -= 1
        following = self._traffics[request.traffic].after(request, self.clock.ns)
        if following is not None:
            self._pending += 1
            self.at(following.at, self.arrive, following)

    # -- replicas ---------------------------------------------------------------------------------------------

    def start(self, name: str, seconds: float | None = None) -> None:
        """Starts a replica: it is paid for from now, and ready after `seconds`; None: what its group takes."""
        plan = self.plans[name]
        replica = plan.make()
        replica.state, replica.all_deltas = "starting", self._tracks
        replica.take, replica.drop = self._note, self._ended
        self.replicas[name] = replica
        self._paid[name] = self.clock.ns
        self.later(plan.start_seconds if seconds is None else seconds, self._ready, replica)

    def _ready(self, replica: SimulatedReplica) -> None:
        if replica.state == "starting":
            replica.state = "ready"
            if self.clock.ns:
                self.say(f"{replica.name} is ready")

    def end(self, name: str, *, moves_after: float = 0.0) -> list[SimulatedRequest]:
        """Ends a replica at once. Its requests go elsewhere `moves_after` seconds later. Returns them."""
        replica = self.replicas.pop(name)
        replica.state, replica.due = "dead", None
        self._pay(name)
        del self._paid[name]
        self._count(replica)
        moved = list(replica.in_flight.values())
        replica.in_flight.clear()
        for request in moved:
            self.later(moves_after, self.move, request)
        return moved

    def _wake(self, replica: SimulatedReplica) -> None:
        """Steps a replica that has a command, unless it awaits a result."""
        if not replica.computes and replica.state != "dead":
            replica.due = self.clock.ns
            self._step(replica)

    def _step(self, replica: SimulatedReplica) -> None:
        if replica.due != self.clock.ns:
            return  # it was ended, or woken meanwhile
        replica.due = following = replica.step()
        if following is not None:
            self._order = order = self._order + 1
            heapq.heappush(self._heap, (following, order, self._step, (replica,)))

    def _note(self, replica: SimulatedReplica, delta: TokenDelta) -> None:
        """Takes the output of a sequence."""
        number = int(delta.request_id)
        if number not in replica.in_flight:
            return
        if number < 0:
            self._ended(replica, number, "done")
            return
        replica.answered(number)
        record = self._records[number]
        record.sent = delta.offset + len(delta.token_ids)
        if record.first < 0 and record.sent:
            record.first = self.clock.ns
            record.cached = delta.cached_tokens
        if delta.finish_reason is not None:
            self._ended(replica, number, "done" if delta.finish_reason in ("stop", "length") else "failed")

    def _ended(self, replica: SimulatedReplica, number: int, status: RequestStatus) -> None:
        request = replica.in_flight.get(number)
        if request is not None:
            replica.gone(request)
            if number < 0:
                self._prefilled(replica if status == "done" else None, request)
            else:
                self._close(request, status)

    def _prefilled(self, source: SimulatedReplica | None, prefill: SimulatedRequest) -> None:
        """A prompt was computed for another replica, or was not: then that computes it. After a move two replicas may
        compute it, and the first one counts."""
        number = -prefill.number
        replica = self.replicas.get(self._records[number].replica)
        request = None if replica is None else replica.in_flight.get(number)
        if request is None or replica is None or not request.awaits:
            return
        request.awaits = False
        if source is None:
            self._send(replica, request.message(self._records[number].sent))
        else:
            self._transfer(source, request)

    # -- counts -----------------------------------------------------------------------------------------------

    def _pay(self, name: str) -> None:
        """Counts what a replica has cost since it was last counted."""
        plan, totals = self.plans[name], self.outcome.totals
        passed = (self.clock.ns - self._paid[name]) / NANO
        self._paid[name] = self.clock.ns
        totals.machine_seconds += passed * plan.share
        totals.device_hours += passed * plan.share * plan.devices / 3600
        totals.cost += passed * plan.share * plan.devices * plan.price / 3600

    def _count(self, replica: SimulatedReplica) -> None:
        """Adds the counters of a replica that ends."""
        stats, totals = replica.scheduler.stats(), self.outcome.totals
        totals.steps += stats.steps
        totals.computed_tokens += stats.computed_tokens
        totals.preemptions += stats.preemptions
        totals.prefix_queries += stats.prefix_queries
        totals.prefix_hits += stats.prefix_hits
        self._rows += replica.rows
        self._busy += replica.busy
        totals.busy_seconds += replica.busy / NANO
        totals.rows_seconds += replica.rows / NANO
        totals.slot_seconds += replica.busy / NANO * replica.slots

    def _sample(self) -> None:
        """Takes a sample, and schedules the next one while anything is left to happen."""
        held = total = filled = room = slots = running = waiting = 0
        busy, rows = self._busy, self._rows
        for name, replica in self.replicas.items():
            self._pay(name)
            stats = replica.scheduler.stats()
            running += stats.running
            waiting += stats.waiting
            total += sum(stats.blocks_total)
            held += sum(stats.blocks_held)
            filled += replica.counter.stored * len(stats.blocks_held)
            room += sum(stats.blocks_held) * replica.capacity.block_size
            slots += replica.slots
            busy += replica.busy
            rows += replica.rows
        paid = round(self.outcome.totals.machine_seconds * NANO)
        before_busy, before_rows, before_paid = self._sampled
        passed, self._sampled = max(paid - before_paid, 1), (busy, rows, paid)
        count = max(len(self.replicas), 1)
        self.outcome.samples.append(
            Sample(
                self.clock.now,
                sum(each.state != "starting" for each in self.replicas.values()),
                running,
                waiting,
                (rows - before_rows) / passed / max(slots / count, 1),
                (busy - before_busy) / passed,
                held / total if total else 0.0,
                min(filled / room, 1.0) if room else nan,
                self.outcome.totals.cost,
            )
        )
        if self._heap:
            self.at(self.clock.ns + self._tick, self._sample)

    def _finish(self) -> None:
        for name, replica in self.replicas.items():
            self._pay(name)
            self._count(replica)
        self.outcome.totals.seconds = self.clock.now


@contextmanager
def _few_collections() -> Iterator[None]:
    """Lets Python look for cycles of objects seldom: a simulation makes many objects, few of them in cycles, and each
    look costs more the more requests there are."""
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTION_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
