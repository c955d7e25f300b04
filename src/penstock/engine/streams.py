"""One engine's events, sorted into the streams of its requests."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from penstock.engine.link.wire import Ended, Event, Ready, Step
from penstock.engine.queue import RequestQueue
from penstock.messages import (
    BlockChanges,
    ControlAnswer,
    EngineError,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineStatus,
    FinishReason,
    GenerateRequest,
    RequestRejected,
    Stream,
    TokenDelta,
)

log = logging.getLogger(__name__)


class DeltaReader:
    """Lets one task at a time wait for the deltas of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._woken: asyncio.Future[None] | None = None  # while `read` blocks
        stream.notify = self._wake

    async def read(self) -> list[TokenDelta]:
        """Return new deltas merged per choice, none at the end. Raises the stream's error.

        If there are none yet, blocks until the stream has `gather` tokens, or a choice's first token or end.
        """
        stream = self._stream
        while not stream.unread:
            if stream.error is not None:
                raise stream.error
            if stream.complete:
                return []
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
        return stream.take()

    def _wake(self) -> None:
        woken = self._woken
        if woken is not None and not woken.done():  # done: it was woken already, or cancelled
            woken.set_result(None)


class Streams:
    """The open streams of one engine, with its stats, replies and end. Used from one event loop.

    `on_failure`, if it is set, is called with the reason when an engine that was ready fails. The streams then stay
    open, `down` has the reason, and `begin` takes the events of a new engine.
    """

    def __init__(self, *, incarnation: int | None, queue: RequestQueue) -> None:
        """Deltas of other incarnations are refused, unless it is None."""
        self.queue = queue
        self.info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.stats = EngineStats()
        self.heard = 0  # events received; there are some whenever there is work
        self.refused = 0  # deltas of another incarnation
        self.failure = ""  # why the engine ended for good
        self.down = ""  # why the last engine ended, until the next one is ready
        self.state = EngineState()
        self.on_failure: Callable[[str], None] | None = None
        self.on_step: Callable[[], None] | None = None  # called after each step, if it is set
        self.on_state: Callable[[], None] = lambda: None  # called when `state` has changed
        self.on_last: Callable[[TokenDelta], object] | None = None  # gets the ends of choices whose stream was closed
        self.on_blocks: Callable[[BlockChanges], None] = lambda changes: None  # gets reports of the prefix cache
        self._incarnation = incarnation
        self._streams: dict[str, Stream] = {}
        self._parts: dict[str, Stream] = {}  # by the engine's name of a choice that was resumed apart
        self._aborting: set[str] = set()  # closed early, and the engine has not confirmed the abort
        self._serials = itertools.count(1)
        self._replies: dict[int, asyncio.Future[ControlAnswer]] = {}
        self._earlier: EngineStats | None = None  # what earlier engines counted
        self._ended_early = ""  # why a new engine ended between Ready and `resumed`

    @property
    def busy(self) -> bool:
        """True while a message from the engine is due."""
        return bool(self._streams or self._aborting or self._replies) and not self.down

    @property
    def idle(self) -> bool:
        """True while no stream is open."""
        return not self._streams

    @property
    def incarnation(self) -> int:
        return self._incarnation or 0

    def open(self, request: GenerateRequest) -> Stream:
        """Raises EngineError after the engine's end, QueueFull, RequestRejected for an id in use or a wrong n."""
        if self.failure:
            raise EngineError(self.failure)
        name = request.request_id
        if name in self._streams or name in self._aborting:
            raise RequestRejected(f"request id {name!r} is in use: give every request an id of its own")
        most, tokens = self.queue.most, request.queued_tokens
        if not 1 <= request.n <= most:
            raise RequestRejected(f"n={request.n}: from 1 to {most} choices are possible")
        if len(self._streams) + len(self._aborting) >= most:
            self.queue.refuse(f"{most} requests are in progress, the limit (--max-num-seqs and --max-waiting together)")
        self.queue.check(tokens, request.priority)
        self.queue.join(tokens)
        stream = self._streams[name] = Stream(request)
        return stream

    def close(self, stream: Stream) -> list[str]:
        """Forget a stream. Return the names under which the engine still works on it, which the caller must abort."""
        stream.closed = True
        self._leave_queue(stream, started=False)
        del self._streams[stream.request.request_id]
        names = stream.names() if stream.in_engine and stream.sent and not self.failure and not self.down else []
        for name in [name for name, part in self._parts.items() if part is stream] if self._parts else ():
            del self._parts[name]
        self._aborting.update(names)
        return names

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int) -> str:
        """Note that the client ends a choice. Return the engine's name of it."""
        stream = self._streams.get(request_id)
        return request_id if stream is None else stream.finish(choice, reason, keep)

    def abort(self, request_id: str) -> list[str]:
        """Note that the client ends a request. Return the names under which the engine works on it."""
        stream = self._streams.get(request_id)
        return [] if stream is None else stream.abort()

    def expect_reply(self) -> tuple[int, asyncio.Future[ControlAnswer]]:
        """Return the serial of a control message, and the future of its reply."""
        if self.failure or self.down:
            raise EngineError(self.failure or f"the engine starts again ({self.down}): try again in a few seconds")
        serial = next(self._serials)
        self._replies[serial] = asyncio.get_running_loop().create_future()
        return serial, self._replies[serial]

    def take(self, event: Event) -> None:
        if self.failure:  # of an engine that was given up
            return
        self.heard += 1
        match event:
            case Step():
                if not self.down:
                    self._take_step(event)
            case Ready():
                self._count(event.stats)
                if not self.info.done():
                    self.info.set_result(event.info)
            case Ended():
                self.fail(event.reason)

    # -- the end of an engine ---------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Take note that the engine has failed. The first reason stays."""
        if self.failure:
            return
        if self.down:  # a new engine did not start, or ended as soon as it was ready
            if self.info.done():
                self._ended_early = reason
            else:
                self.info.set_exception(EngineError(reason))
            return
        started = self.info.done() and not self.info.cancelled()  # else its start raises the reason
        if started:
            log.error("the engine has failed: %s", reason)
        if not started or self.on_failure is None:
            self.end(reason)
            return
        self.rest(reason, "restarting")
        self.on_failure(reason)

    def rest(self, reason: str, status: EngineStatus) -> None:
        """Take note that there is no engine now, but that one can be started again."""
        self.down = reason
        self._fail_replies(reason)
        self._earlier = self.stats = self.stats.ended()
        self.become(status)

    def become(self, status: EngineStatus) -> None:
        self.follow(replace(self.state, status=status))

    def follow(self, state: EngineState) -> None:
        """Take the state of the engine, as another process has it or as it is known here."""
        self.state = state
        self.on_state()

    def begin(self, incarnation: int) -> None:
        """Take the events of a new engine, which is being started."""
        self._incarnation = incarnation
        self._ended_early = ""
        self.info = asyncio.get_running_loop().create_future()

    def resumed(self) -> None:
        """Take note that the new engine is ready. If it has ended since, it fails here."""
        self.down = ""
        self.become("ready")
        if self._ended_early:
            self.fail(self._ended_early)

    def unfinished(self) -> list[Stream]:
        """The streams that the engine must go on with, in the order in which they were opened."""
        return [stream for stream in self._streams.values() if stream.in_engine and stream.error is None]

    def requests(self, stream: Stream) -> list[GenerateRequest]:
        """Return what the engine must be sent to begin a stream, or to go on with it."""
        requests = stream.requests()
        for request in requests:
            if request.request_id != stream.request.request_id:
                self._parts[request.request_id] = stream
        return requests

    def end(self, reason: str) -> None:
        """End all streams and replies; the engine is gone."""
        if self.failure:
            return
        self.failure, self.down = reason, ""
        for stream in list(self._streams.values()):  # a fleet's client takes them away meanwhile
            stream.fail(EngineError(reason))
        if not self.info.done():
            self.info.set_exception(EngineError(reason))
        self._fail_replies(reason)
        self.become("ended")

    def _fail_replies(self, reason: str) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineError(reason))
        self._replies.clear()
        self._aborting.clear()

    # -- events -----------------------------------------------------------------------------------------------

    def _count(self, stats: EngineStats) -> None:
        self.queue.running = stats.running
        self.stats = stats if self._earlier is None else stats.after(self._earlier)

    def _push(self, deltas: Iterable[TokenDelta]) -> None:
        current = self._incarnation
        for delta in deltas:
            if current is not None and delta.incarnation != current:
                self._refuse(delta)
            elif (stream := self._find(delta.request_id)) is not None:
                stream.push(delta)
            elif self.on_last is not None and delta.timing is not None and delta.timing.usage is not None:
                self.on_last(delta)

    def _find(self, name: str) -> Stream | None:
        return self._streams.get(name) or self._parts.get(name)

    def _take_step(self, step: Step) -> None:
        if step.stats is not None:
            self._count(step.stats)
        self._push(step.deltas)
        for name in step.begun:
            if (stream := self._find(name)) is not None:
                stream.begun = True
                self._leave_queue(stream, started=True)
                stream.notify()
        for rejected in step.rejected:
            if (stream := self._find(rejected.request_id)) is not None:
                stream.refuse(rejected.error())
        self._aborting.difference_update(step.aborted)
        for reply in step.replies:
            reply.settle(self._replies.pop(reply.serial, None))
        for changes in step.blocks:
            self.on_blocks(changes)
        if self.on_step is not None:
            self.on_step()

    def _leave_queue(self, stream: Stream, *, started: bool) -> None:
        if stream.waits:
            stream.waits = False
            self.queue.leave(stream.request.queued_tokens, started=started)

    def _refuse(self, delta: TokenDelta) -> None:
        self.refused += 1
        if self.refused == 1:
            log.warning("refused a delta of incarnation %d; this is %d", delta.incarnation, self._incarnation)
