"""A client of one engine, on a thread or in a process. It can start the engine again and go on with its requests."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from msgspec.structs import replace

from penstock.engine.link.wire import Abort, Add, Control, Finish, encode
from penstock.engine.pace import Pace
from penstock.engine.queue import RequestQueue
from penstock.engine.recovery import Recovery
from penstock.engine.streams import DeltaReader, Streams
from penstock.messages import (
    BlockChanges,
    Clock,
    Completed,
    ControlAnswer,
    ControlMessage,
    DeadlineExceeded,
    EngineError,
    EngineInfo,
    EngineState,
    EngineStats,
    FinishReason,
    GenerateRequest,
    RequestRejected,
    Sleep,
    Stream,
    TokenDelta,
    Wake,
    other_region,
)

CLOSE_SECONDS = 5.0  # that the current step may take to end after a Stop

_ASLEEP = "the engine is asleep"
_OTHER_WEIGHTS = (
    "the engine that was started again has other weights or kernels than the one before, so its streams cannot go on: "
    "the model's files, or the machine's software, changed while it ran"
)

log = logging.getLogger(__name__)


class EngineLink(Protocol):
    """Sends commands to an engine. Its events go into the Streams the link was made with."""

    def send(self, frame: bytes) -> None:
        """Never blocks; ignored after the engine's end. The bytes unsent are bounded by the streams' limit."""

    def kill(self) -> None:
        """End the engine at once, as far as possible."""

    async def close(self) -> None:
        """End the engine after its current step and release everything. May be called twice."""


# Starts an engine with the next incarnation, whose events go into the same streams. Raises EngineError.
Restart = Callable[[int], Awaitable[tuple[EngineInfo, EngineLink]]]


class StreamingClient:
    """messages.EngineClient over a link. With `restart`, an engine that has ended is replaced: its requests go on after
    their last tokens, and new ones wait."""

    def __init__(
        self,
        info: EngineInfo,
        link: EngineLink,
        streams: Streams,
        pace: Pace | None,
        *,
        clock: Clock,
        restart: Restart | None = None,
    ) -> None:
        """The times of requests are on `clock`. With `pace`, an engine that makes no steps is given up."""
        self.info = info
        self.clock = clock
        self.round_trip: Callable[[], float] = lambda: 0.0  # seconds to the engine's machine and back
        self._link = link
        self._streams = streams
        self._recovery = Recovery(clock)
        self._restart = restart
        self._restarting: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = None if pace is None else self._loop.call_later(pace.tick_seconds, self._tick, pace)
        if restart is not None:
            streams.on_failure = self._engine_failed

    async def generate(self, request: GenerateRequest, gather: int = 1) -> AsyncGenerator[TokenDelta, None]:
        """Deltas until every choice has finished, see messages.EngineClient. Closing it early aborts the request."""
        stream = self.open(request)
        stream.gather = gather
        reader = DeltaReader(stream)
        timers = stream.watch_deadlines(self.clock(), self._loop.call_later)
        try:
            while deltas := await reader.read():
                for delta in deltas:
                    yield delta
        except DeadlineExceeded:
            self._streams.queue.late += 1
            raise
        finally:
            for timer in timers:
                timer.cancel()
            self.release(stream)

    def open(self, request: GenerateRequest) -> Stream:
        """Send a request. The caller must `release` the stream of its deltas. Raises what `generate` raises before
        them."""
        frame = self._encode(request)
        if request.regions and self.info.region not in request.regions:
            raise EngineError(other_region("the engine", self.info.region, request.regions))
        self._recovery.check(request)
        stream = self._streams.open(request)
        if self._streams.down or self._recovery.holding:
            self._recovery.hold(stream, alone=self._recovery.holding)
            self._begin_to_wake()
        else:
            stream.sent = True
            self._link.send(frame)
        return stream

    def release(self, stream: Stream) -> None:
        """Forget a stream, and abort what is unfinished of it."""
        for name in self._streams.close(stream):
            self._link.send(encode(Abort(name)))

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int) -> None:
        name = self._streams.finish(request_id, choice, reason, keep)
        self._link.send(encode(Finish(name, choice, reason, keep)))

    def abort(self, request_id: str) -> None:
        for name in self._streams.abort(request_id):
            self._link.send(encode(Abort(name)))

    def stats(self) -> EngineStats:
        return self._streams.stats

    @property
    def queue(self) -> RequestQueue:
        return self._streams.queue

    @property
    def state(self) -> EngineState:
        return self._streams.state

    @property
    def idle(self) -> bool:
        """True while no request is open."""
        return self._streams.idle

    def on_change(self, call: Callable[[], None]) -> None:
        """Let `call` be called when `state` has changed."""
        self._streams.on_state = call

    def watch_ends(self, call: Callable[[TokenDelta], object]) -> None:
        """Let `call` get the last deltas of choices whose stream was closed before their end."""
        self._streams.on_last = call

    def on_blocks(self, call: Callable[[BlockChanges], None]) -> None:
        """Let `call` get the reports of the prefix cache, which `WatchBlocks` asks for."""
        self._streams.on_blocks = call

    @property
    def failure(self) -> str:
        """Why the engine has ended for good, or ""."""
        return self._streams.failure

    async def control(self, message: ControlMessage) -> ControlAnswer:
        """See messages.EngineClient. A client that can start the engine executes Sleep and Wake itself; else the other
        end does, if it can."""
        match message:
            case Sleep() if self._restart is not None:
                await self._sleep()
                return Completed()
            case Wake() if self._restart is not None:
                await self._wake()
                return Completed()
        serial, reply = self._streams.expect_reply()
        self._link.send(encode(Control(serial, message)))
        return await reply

    async def close(self) -> None:
        """End the engine. Streams still open end with EngineError. May be called twice."""
        self._stop_timer()
        self._streams.end("the engine is closed")
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self._link.close()

    # -- sleep ------------------------------------------------------------------------------------------------

    async def _sleep(self) -> None:
        """See messages.Sleep."""
        streams = self._streams
        if streams.state.status == "asleep":
            return
        if streams.state.status != "ready" or not streams.idle:
            raise EngineError("the engine works on requests or is not ready, and cannot sleep now")
        streams.rest(_ASLEEP, "asleep")
        await self._link.close()

    async def _wake(self) -> None:
        """See messages.Wake."""
        self._begin_to_wake()
        if self._restarting is not None:
            await asyncio.wait([self._restarting])
        if self._streams.failure:
            raise EngineError(self._streams.failure)

    def _begin_to_wake(self) -> None:
        if self._streams.state.status == "asleep":
            self._streams.become("restarting")
            self._restarting = self._loop.create_task(self._start_sleeping())

    async def _start_sleeping(self) -> None:
        """Start the engine that was ended, and send it what has come since."""
        began = self._loop.time()
        await self._link.close()
        if await self._start(_ASLEEP, 0.0):
            log.info("the engine is awake after %.1f s", self._loop.time() - began)
            self._send_waiting()

    # -- an engine that ends ----------------------------------------------------------------------------------

    def _tick(self, pace: Pace) -> None:
        streams = self._streams
        stalled = pace.tick(streams.heard if streams.busy else None, streams.stats)
        self._timer = self._loop.call_later(pace.tick_seconds, self._tick, pace)
        if stalled:
            streams.fail(f"the engine made no step for {stalled:.3g} s and was given up (--step-deadline)")
            self._link.kill()
            if streams.failure:
                self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _engine_failed(self, reason: str) -> None:
        self._restarting = self._loop.create_task(self._replace(reason))

    async def _replace(self, reason: str) -> None:
        """Start an engine in the place of one that has ended, and go on with its requests."""
        began, streams = self._loop.time(), self._streams
        self._recovery.engine_ended(streams.unfinished())
        self._link.kill()
        await self._link.close()
        if not await self._start(reason, self._recovery.delay()):
            return
        streams.follow(replace(streams.state, restarts=streams.state.restarts + 1))
        resumed = self._send_waiting()
        log.warning(
            "the engine is back after %.1f s; %d requests go on, and %s",
            self._loop.time() - began,
            resumed,
            "the others are tried one by one" if self._recovery.holding else "none is held back",
        )

    async def _start(self, reason: str, delay: float | None) -> bool:
        """Start engines, the first after `delay` seconds, until one is ready. Gives up after several in a minute, and
        for other weights: the client's tokenizer and the open streams are those of the ones before. Returns whether an
        engine runs."""
        streams = self._streams
        assert self._restart is not None
        while delay is not None:
            await asyncio.sleep(delay)
            streams.begin(streams.incarnation + 1)
            try:
                info, self._link = await self._restart(streams.incarnation)
            except EngineError as error:
                reason = str(error)
                log.error("the engine did not start again: %s", reason)
                delay = self._recovery.delay()
            else:
                if info.identity != self.info.identity:
                    streams.end(_OTHER_WEIGHTS)
                    return False
                self.info = info
                streams.resumed()
                return not streams.down
        streams.end(f"{reason}. It ended too often within a minute, and is not started again")
        return False

    def _send_waiting(self) -> int:
        """Send a new engine the requests that go on at once, whose number is returned, and the first of those that are
        tried one by one."""
        resumed = self._recovery.ready()
        for stream in resumed:
            self._send(stream)
        self._try_next()
        self._streams.on_step = self._try_next if self._recovery.holding else None
        return len(resumed)

    def _try_next(self) -> None:
        """Send held requests as they may be tried. The streams call it after each step."""
        while (stream := self._recovery.next()) is not None:
            self._send(stream)
        if not self._recovery.holding:
            self._streams.on_step = None

    def _send(self, stream: Stream) -> None:
        for request in self._streams.requests(stream):
            self._link.send(encode(Add(request, self.clock())))

    def _encode(self, request: GenerateRequest) -> bytes:
        """Encode a new request. Raises RequestRejected for a value that msgpack cannot hold, such as a token id of
        2**70."""
        if not isinstance(request.request_id, str):
            raise RequestRejected(f"request id {request.request_id!r} is not a string")
        try:
            return encode(Add(request, self.clock()))
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestRejected(f"invalid request: {error}") from error
