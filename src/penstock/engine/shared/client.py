"""The engine as an API process sees it that shares it with others."""

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec

from penstock.engine.client import StreamingClient
from penstock.engine.link.mux import Mux
from penstock.engine.link.wire import EngineState, Ready, Stop, decode_event, encode
from penstock.engine.queue import RequestQueue
from penstock.engine.shared.orders import GONE
from penstock.engine.streams import Streams
from penstock.messages import EngineError, EngineInfo, EngineStats, FinishReason, GenerateRequest, TokenDelta


class SharedEngine:
    """messages.EngineClient over a hub, which starts the engine again when it ends: here, streams only pause."""

    def __init__(self, mux: Mux, version: int) -> None:
        """`version` is the channel of the model's version. Await `ready` first."""
        self._channel = mux.open(version, self._take, self._lost)
        self.info: EngineInfo
        self._state: EngineState
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began = False  # the engine is there, and what follows of it: info, state, streams and client

    async def ready(self) -> None:
        """Return when the engine is there. Raises EngineError if it will not be."""
        await self._ready

    def _begin(self, state: EngineState) -> None:
        queue = RequestQueue(
            max_num_seqs=state.info.max_num_seqs,
            max_waiting=state.max_waiting,
            max_waiting_tokens=state.max_waiting_tokens,
            clock=time.monotonic,
        )
        self._streams = Streams(incarnation=None, queue=queue)
        self._streams.take(Ready(state.info, state.stats))
        self._client = StreamingClient(state.info, self, self._streams, None)
        self._began = True
        self._ready.set_result(None)

    # -- messages.EngineClient ------------------------------------------------------------------------------------

    @property
    def queue(self) -> RequestQueue:
        return self._streams.queue

    def generate(self, request: GenerateRequest, gather: int = 1) -> AsyncGenerator[TokenDelta, None]:
        return self._client.generate(request, gather)

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int) -> None:
        self._client.finish(request_id, choice, reason, keep)

    def abort(self, request_id: str) -> None:
        self._client.abort(request_id)

    def stats(self) -> EngineStats:
        return self._streams.stats

    @property
    def healthy(self) -> bool:
        return not self._streams.failure

    @property
    def restarting(self) -> bool:
        return self._state.restarting

    @property
    def restarts(self) -> int:
        return self._state.restarts

    @property
    def asleep(self) -> bool:
        return self._state.asleep

    async def sleep(self) -> None:
        """See messages.EngineClient. The requests of all processes count."""
        await self.control("sleep")

    async def wake(self) -> None:
        """See messages.EngineClient."""
        await self.control("wake")

    async def control(self, message: str) -> str:
        """See messages.EngineClient."""
        return await self._client.control(message)

    # -- EngineLink -----------------------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        self._channel.send(frame)

    def kill(self) -> None:
        """The engine is not this process's to end."""

    async def close(self) -> None:
        """Leave the hub, which aborts what is unfinished. Streams still open end with EngineError."""
        self._end("the engine is closed")
        self._channel.send(encode(Stop("the process needs the version no longer")))
        self._channel.close()

    def _take(self, frame: bytes) -> None:
        try:
            event = decode_event(frame)
        except msgspec.DecodeError as error:
            self._end(f"{GONE}, or is of another version: {error}")
            return
        match event:
            case EngineState():
                self._state, self.info = event, event.info
                if not self._ready.done():
                    self._begin(event)
            case _ if self._began:
                self._streams.take(event)

    def _lost(self) -> None:
        self._end(GONE)

    def _end(self, reason: str) -> None:
        if self._began:
            self._streams.end(reason)
        elif not self._ready.done():
            self._ready.set_exception(EngineError(reason))
            self._ready.exception()  # else asyncio logs it if nobody waits for the engine
