"""A client of one engine, whichever way its engine is reached."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from penstock.engine.link.wire import Abort, Add, Control, Finish, encode
from penstock.engine.streams import Streams
from penstock.messages import EngineInfo, EngineStats, FinishReason, GenerateRequest, RequestRejected, TokenDelta

STALL_TICKS = 4  # in a step_deadline
CLOSE_SECONDS = 5.0  # for the current step to end when the engine is closed


class EngineLink(Protocol):
    """The way to an engine. What comes back goes into the Streams the link was made with."""

    def send(self, frame: bytes) -> None:
        """Never waits; ignored once the engine has ended. What can pile up is bounded by the streams' limit."""
        ...

    def kill(self) -> None:
        """End the engine at once, as far as that can be done."""
        ...

    async def close(self) -> None:
        """Let the engine end, and leave nothing behind. May be called twice."""
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
    """Judges an engine by its client's own ticks: a client that was itself stopped for long has seen only one pass."""

    def __init__(self) -> None:
        self._heard: int | None = None
        self._still = 0

    def tick(self, heard: int | None) -> int:
        """How many ticks in a row found no event since the last, of `heard` in all. None: no answer is owed."""
        self._still = self._still + 1 if heard is not None and heard == self._heard else 0
        self._heard = heard
        return self._still


def _encode_request(request: GenerateRequest) -> bytes:
    """RequestRejected where a value cannot be sent at all, such as a token id of 2**70."""
    if not isinstance(request.request_id, str):
        raise RequestRejected(f"request id {request.request_id!r} is not a string")
    try:
        return encode(Add(request))
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestRejected(f"invalid request: {error}") from error
