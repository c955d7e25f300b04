"""One engine's events, sorted into the streams of its requests."""

import asyncio
import itertools
import logging
from collections.abc import Iterable

from penstock.engine.link.merge import DeltaBuffer
from penstock.engine.link.wire import ControlReply, Ended, Event, Ready, Rejected, Step
from penstock.messages import (
    EngineError,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    QueueFull,
    RequestRejected,
    TokenDelta,
)

log = logging.getLogger(__name__)


class Stream:
    """Buffers the deltas of one request until its consumer reads them. Bounded by the request's own max_tokens."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        choices = range(request.first_choice, request.first_choice + request.n)
        self._expected = dict.fromkeys(choices, len(request.output_ids))  # next offset of each unfinished choice
        self._buffer = DeltaBuffer()
        self._error: Exception | None = None
        self._refused = False  # by the engine
        self._news = asyncio.Event()

    @property
    def in_engine(self) -> bool:
        """True while the engine may still work on the request."""
        return bool(self._expected) and not self._refused

    def push(self, delta: TokenDelta) -> None:
        """Take a delta that continues its choice; anything else means that tokens were lost, and ends the stream."""
        expected = self._expected.get(delta.choice)
        if expected is None:
            return  # that choice has ended
        if delta.offset > expected or (delta.offset < expected and delta.finish_reason is None):
            self.fail(EngineError(f"choice {delta.choice}: expected token {expected}, got token {delta.offset}"))
            return
        if delta.finish_reason is None:
            self._expected[delta.choice] = delta.offset + len(delta.token_ids)
        else:
            del self._expected[delta.choice]
        self._buffer.push(delta)
        self._news.set()

    def reject(self, rejected: Rejected) -> None:
        """The engine has refused the request."""
        self._refused = True
        self.fail((QueueFull if rejected.queue_full else RequestRejected)(rejected.message))

    def fail(self, error: Exception) -> None:
        """End the stream after what has been pushed. The first error stays."""
        self._error = self._error or error
        self._news.set()

    async def read(self) -> list[TokenDelta]:
        """Return new deltas merged per choice, none at the end. Blocks until there are some. Raises `fail`'s error."""
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if not self._expected:
                return []
            self._news.clear()
            await self._news.wait()
        return self._buffer.take()


class Streams:
    """The open streams of one engine, with its stats, replies and end. Used from one event loop."""

    def __init__(self, *, incarnation: int, limit: int) -> None:
        self.info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.stats = EngineStats()
        self.heard = 0  # events received; there are some whenever there is work
        self.refused = 0  # deltas of another incarnation
        self.failure = ""  # why the engine ended
        self._incarnation = incarnation
        self._limit = limit
        self._streams: dict[str, Stream] = {}
        self._aborting: set[str] = set()  # closed early, and the engine has not confirmed the abort
        self._serials = itertools.count(1)
        self._replies: dict[int, asyncio.Future[str]] = {}

    @property
    def busy(self) -> bool:
        """True while a message from the engine is due."""
        return bool(self._streams or self._aborting or self._replies)

    def open(self, request: GenerateRequest) -> Stream:
        """Raises EngineError after the engine's end, QueueFull, RequestRejected for an id in use or a wrong n."""
        if self.failure:
            raise EngineError(self.failure)
        name = request.request_id
        if name in self._streams or name in self._aborting:
            raise RequestRejected(f"request id {name!r} is in use: give every request an id of its own")
        if len(self._streams) + len(self._aborting) >= self._limit:
            raise QueueFull(f"{self._limit} requests are in progress, which is the limit: try again later")
        if not 1 <= request.n <= self._limit:
            raise RequestRejected(f"n={request.n}: from 1 to {self._limit} choices are possible")
        stream = self._streams[name] = Stream(request)
        return stream

    def close(self, stream: Stream) -> bool:
        """Forget a stream. Returns True when the engine still works on it, so that the caller must send an abort."""
        del self._streams[stream.request_id]
        early = stream.in_engine and not self.failure
        if early:
            self._aborting.add(stream.request_id)
        return early

    def expect_reply(self) -> tuple[int, asyncio.Future[str]]:
        """Return the serial of a control message, and the future of its reply."""
        if self.failure:
            raise EngineError(self.failure)
        serial = next(self._serials)
        self._replies[serial] = asyncio.get_running_loop().create_future()
        return serial, self._replies[serial]

    def take(self, event: Event) -> None:
        if self.failure:  # of an engine that was given up
            return
        self.heard += 1
        match event:
            case Step():
                self._take_step(event)
            case Ready():
                self.stats = event.stats
                if not self.info.done():
                    self.info.set_result(event.info)
            case Ended():
                self.fail(event.reason)

    def fail(self, reason: str) -> None:
        """End all streams and replies because the engine has failed. The first reason stays."""
        if not self.failure and self.info.done() and not self.info.cancelled():  # else its start raises the reason
            log.error("the engine has failed: %s", reason)
        self.end(reason)

    def end(self, reason: str) -> None:
        """End all streams and replies; the engine is gone."""
        if self.failure:
            return
        self.failure = reason
        for stream in self._streams.values():
            stream.fail(EngineError(reason))
        waiting: list[asyncio.Future[EngineInfo] | asyncio.Future[str]] = [self.info, *self._replies.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineError(reason))
        self._replies.clear()
        self._aborting.clear()

    def _push(self, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            if delta.incarnation != self._incarnation:
                self._refuse(delta)
            elif (stream := self._streams.get(delta.request_id)) is not None:
                stream.push(delta)

    def _take_step(self, step: Step) -> None:
        self.stats = step.stats
        self._push(step.deltas)
        for rejected in step.rejected:
            if (stream := self._streams.get(rejected.request_id)) is not None:
                stream.reject(rejected)
        self._aborting.difference_update(step.aborted)
        for reply in step.replies:
            self._answer(reply)

    def _refuse(self, delta: TokenDelta) -> None:
        self.refused += 1
        if self.refused == 1:
            log.warning("refused a delta of incarnation %d; this is %d", delta.incarnation, self._incarnation)

    def _answer(self, reply: ControlReply) -> None:
        future = self._replies.pop(reply.serial, None)
        if future is None or future.done():  # its caller has gone
            return
        if reply.error:
            future.set_exception(ValueError(reply.error))
        else:
            future.set_result(reply.text)
