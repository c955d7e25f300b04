"""The open requests of a fleet's client: which engine has each, which are held, and how they move."""

import asyncio
from collections.abc import Mapping

from penstock.cluster.budget import MoveBudget
from penstock.cluster.moving import MovingStream, StreamPart
from penstock.cluster.placing import Placing, leave, leave_prefill
from penstock.cluster.replica import Replica
from penstock.cluster.route import Route
from penstock.messages import (
    Clock,
    EndsEngines,
    EngineError,
    FinishReason,
    GenerateRequest,
    QueueFull,
    RequestRejected,
    TokenDelta,
)

HOLD_SECONDS = 60.0  # for which a request waits for an engine that can take it, by default
MOST_HELD = 1024  # requests that wait for an engine
MOST_CHOICES = 1 << 16  # of a request; an engine's own limit is lower
MOST_MOVES = 16  # of a request
MOST_CRASHES = 2  # engines that may end while they compute a prompt; then it is refused


class FleetRequests:
    """Sends requests to engines, and holds those that no engine can take now. Used from one event loop."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        route: Route,
        clock: Clock,
        *,
        front: str,
        seed: int,
        move_anywhere: bool,
        hold_seconds: float,
    ) -> None:
        """A request waits for `hold_seconds` for an engine that can take it. See Placing for the others."""
        self._replicas, self._clock = replicas, clock
        self.placing = Placing(replicas, route, self._news, clock, front=front, seed=seed, move_anywhere=move_anywhere)
        self.moves = {"ended": 0, "hung": 0, "draining": 0}  # requests that had to move, by what their engine did
        self.failure = ""  # why the client has ended
        self.expected: int | None = None  # engines that there will be; None: unknown
        self._hold_seconds = hold_seconds
        self._streams: dict[str, MovingStream] = {}
        self._held: dict[MovingStream, None] = {}  # in the order in which they are placed
        self._budget = MoveBudget(clock())
        self._loop = asyncio.get_running_loop()

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def idle(self) -> bool:
        return not self._streams

    def open(self, request: GenerateRequest, gather: int) -> MovingStream:
        """Send a request, or hold it. Raises what an engine's client raises."""
        name = request.request_id
        if self.failure:
            raise EngineError(self.failure)
        if not isinstance(name, str):
            raise RequestRejected(f"request id {name!r} is not a string")
        if name in self._streams:
            raise RequestRejected(f"request id {name!r} is in use: give every request an id of its own")
        if not 1 <= request.n <= MOST_CHOICES:
            raise RequestRejected(f"n={request.n}: from 1 to {MOST_CHOICES} choices are possible")
        self._budget.request()
        stream = self._streams[name] = MovingStream(request, gather)
        try:
            if (full := self.placing.place(stream)) is not None:
                raise full
            if not stream.parts and not stream.over:
                if len(self._held) >= MOST_HELD:
                    raise QueueFull(f"{MOST_HELD} requests wait for an engine of the fleet, the limit", 5)
                self._hold(stream)
        except BaseException:
            del self._streams[name]
            raise
        return stream

    def end(self, stream: MovingStream) -> None:
        """Forget a request, and abort what is unfinished of it."""
        self._held.pop(stream, None)
        take_away(stream)
        del self._streams[stream.request.request_id]

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int) -> None:
        """See messages.EngineClient."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.record.finish(choice, reason, keep)
        if not stream.parts:
            stream.record.push(TokenDelta(request_id, choice, keep, (), reason))
        for part in stream.parts:
            if part.has(choice):
                part.replica.engine.finish(part.name, choice, reason, keep)

    def abort(self, request_id: str) -> None:
        """See messages.EngineClient."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.record.abort()
            for part in stream.parts:
                part.replica.engine.abort(part.name)

    def fail_all(self, reason: str) -> None:
        """End all streams, and take no more."""
        self.failure = self.failure or reason
        for stream in self._streams.values():
            stream.record.fail(EngineError(self.failure))
        self._held.clear()

    def _news(self, stream: MovingStream, part: StreamPart) -> None:
        """Run when an engine has begun a request, has sent tokens of it, or has refused or failed it."""
        inner = part.stream
        if inner.begun and not part.answered and not inner.answered:
            part.replica.begun(part, self._clock())
        if not part.answered and inner.answered:
            part.answered = True
            part.replica.answered(part)
            leave_prefill(stream)
            stream.crashes = 0
            stream.excluded.clear()
            if self._held:
                self._loop.call_soon(self.place_held)  # one of them may have waited for this
        if inner.error is not None and part in stream.parts:
            self._failed(stream, part.replica, inner.error)
        stream.wake()

    def _failed(self, stream: MovingStream, replica: Replica, error: Exception) -> None:
        if self.failure:
            stream.record.fail(error)
        elif isinstance(error, QueueFull) and self._may_try_another(stream, replica):
            stream.excluded.add(replica.name)
            take_away(stream)
            self._hold(stream)
            self.place_held()
        elif not isinstance(error, EngineError):
            stream.collect()
            stream.record.fail(error)
        elif replica.engine.failure:
            self.move(replica, "ended")
        else:  # of this request alone: tokens were lost
            self._move_one(stream, "ended")
            self.place_held()

    def _may_try_another(self, stream: MovingStream, replica: Replica) -> bool:
        """Return whether a request whose engine was full may go to one that has not refused it."""
        others = {each.name for each in self._replicas.values() if each.status == "ready"}
        return not stream.record.has_tokens and bool(others - stream.excluded - {replica.name})

    def move(self, replica: Replica, why: str) -> None:
        """Let the requests of an engine that has ended go on elsewhere."""
        self._drop_prefills(replica, why)
        for stream in self._streams_of(replica):
            self._move_one(stream, why)
        self.place_held()

    def move_if_possible(self, replica: Replica, why: str) -> None:
        """Let the requests of an engine that still runs go on elsewhere, if another one can take them."""
        self._drop_prefills(replica, why)
        for stream in self._streams_of(replica):
            if self.placing.choose(stream).replicas:
                self._move_one(stream, why)
        self.place_held()

    def _streams_of(self, replica: Replica) -> list[MovingStream]:
        return list(dict.fromkeys(part.owner for part in replica.parts))

    def _drop_prefills(self, replica: Replica, why: str) -> None:
        """End the prompts that an engine computes for others. These notice, and compute the rest, unless it only hangs:
        then the requests go on elsewhere."""
        for part in [part for part in replica.parts if part is part.owner.prefill]:
            stream = part.owner
            leave_prefill(stream)
            if why == "hung":
                self._move_one(stream, why)
            elif why == "ended" and part.stream.begun:
                stream.crashes += 1

    def _move_one(self, stream: MovingStream, why: str) -> None:
        """Take a request from its engine, and hold it."""
        parts = stream.parts
        suspect = why == "ended" and any(part.stream.begun and not part.answered for part in parts)
        for part in parts:
            stream.excluded.add(part.replica.name)
            part.replica.moved += 1
        take_away(stream)
        if stream.over:
            stream.wake()
            return
        self.moves[why] += 1
        stream.moves += 1
        stream.crashes = stream.crashes + 1 if suspect else 0
        if stream.crashes >= MOST_CRASHES:
            stream.record.fail(
                EndsEngines("two engines ended while they computed this prompt, which is refused: do not send it again")
            )
        elif stream.moves > MOST_MOVES:
            stream.record.fail(EngineError(f"the request had to move {stream.moves} times, and is given up"))
        else:
            self._hold(stream)

    def _hold(self, stream: MovingStream) -> None:
        stream.record.sent = False
        stream.held_since = self._clock()
        self._held[stream] = None

    def place_held(self) -> None:
        """Send held requests as far as engines take them. Of those that may end engines, each gets one at a time."""
        if not self._held:
            return
        now = self._clock()
        for stream in list(self._held):
            if stream.crashes and not self._may_be_tried(stream):
                continue
            if stream.moves and not self._budget.allows(now):
                return
            if not stream.over:
                try:
                    self.placing.place(stream)
                except Exception as error:
                    stream.record.fail(error)
            if stream.parts and stream.moves:
                self._budget.take()
            if stream.parts or stream.over:
                self._held.pop(stream, None)

    def _may_be_tried(self, stream: MovingStream) -> bool:
        """Return whether there is an engine without a suspect, which then gets this one."""
        trying = {part.replica.name for other in self._streams.values() if other.on_trial for part in other.parts}
        stream.excluded |= trying
        return not {each.name for each in self._replicas.values() if each.status == "ready"} <= trying

    def give_up_held(self) -> None:
        """End the requests that have waited too long for an engine, unless one is being started."""
        statuses = [replica.status for replica in self._replicas.values()]
        if "starting" in statuses or statuses.count("ready") < (self.expected or 0):
            return
        now = self._clock()
        for stream in [each for each in self._held if now - each.held_since >= self._hold_seconds]:
            del self._held[stream]
            message = f"no engine of the fleet could take the request for {self._hold_seconds:g} s"
            stream.record.fail(EngineError(f"{message}: {stream.why_held}"))


def take_away(stream: MovingStream) -> None:
    """Take what a request's engines have sent, and end it there."""
    stream.collect()
    parts, stream.parts = stream.parts, []
    for part in parts:
        leave(part)
    leave_prefill(stream)
