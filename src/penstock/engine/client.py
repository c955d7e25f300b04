"""A client of one engine, on a thread or in a process."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from penstock.engine.link.wire import Abort, Add, Control, Finish, encode
from penstock.engine.streams import Streams
from penstock.messages import EngineInfo, EngineStats, FinishReason, GenerateRequest, RequestRejected, TokenDelta

STALL_TICKS = 4  # in a step_deadline
CLOSE_SECONDS = 5.0  # that the current step may take to end after a Stop


class EngineLink(Protocol):
    """Sends commands to an engine. Its events go into the Streams the link was made with."""

    def send(self, frame: bytes) -> None:
        """Never blocks; ignored after the engine's end. The bytes unsent are bounded by the streams' limit."""
        ...

    def kill(self) -> None:
        """End the engine at once, as far as possible."""
        ...

    async def close(self) -> None:
        """End the engine after its current step and release everything. May be called twice."""
        ...


class StreamingClient:
    """messages.EngineClient over a link."""

    def __init__(self, info: EngineInfo, link: EngineLink, streams: Streams, *, step_deadline: float) -> None:
        self.info = info
        self._link = link
        self._streams = streams
        self._deadline = step_deadline
        self._progress = Progress()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(step_deadline / STALL_TICKS, self._tick)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Deltas until every choice has finished, see messages.EngineClient. Closing it early aborts the request."""
        frame = _encode_request(request)
        stream = self._streams.open(request)
        try:
            self._link.send(frame)
            while deltas := await stream.read():
                for delta in deltas:
                    yield delta
        finally:
            if self._streams.close(stream):
                self.abort(request.request_id)

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int) -> None:
        self._link.send(encode(Finish(request_id, choice, reason, keep)))

    def abort(self, request_id: str) -> None:
        self._link.send(encode(Abort(request_id)))

    def stats(self) -> EngineStats:
        return self._streams.stats

    @property
    def healthy(self) -> bool:
        return not self._streams.failure

    async def control(self, message: str) -> str:
        serial, reply = self._streams.expect_reply()
        self._link.send(encode(Control(serial, message)))
        return await reply

    async def close(self) -> None:
        """End the engine. Streams still open end with EngineError. May be called twice."""
        self._timer.cancel()
        self._streams.end("the engine is closed")
        await self._link.close()

    def _tick(self) -> None:
        if self._progress.tick(self._streams.heard if self._streams.busy else None) < STALL_TICKS:
            self._timer = self._loop.call_later(self._deadline / STALL_TICKS, self._tick)
            return
        self._streams.fail(f"the engine made no step for {self._deadline:g} s (step_deadline) and was given up")
        self._link.kill()


class Progress:
    """Counts the client's ticks without an event. Time in which the client was stopped counts as one tick."""

    def __init__(self) -> None:
        self._heard: int | None = None
        self._still = 0

    def tick(self, heard: int | None) -> int:
        """Return how many ticks in a row found `heard`, the events so far, unchanged. None: no event is due."""
        self._still = self._still + 1 if heard is not None and heard == self._heard else 0
        self._heard = heard
        return self._still


def _encode_request(request: GenerateRequest) -> bytes:
    """Encode a request. Raises RequestRejected for a value that msgpack cannot hold, such as a token id of 2**70."""
    if not isinstance(request.request_id, str):
        raise RequestRejected(f"request id {request.request_id!r} is not a string")
    try:
        return encode(Add(request))
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestRejected(f"invalid request: {error}") from error
