"""The engine as an API process, or a front elsewhere, sees it that shares it with others."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from penstock.engine.client import StreamingClient
from penstock.engine.link.mux import Mux
from penstock.engine.link.wire import Ready, SharedState, Stop, decode_event, encode
from penstock.engine.queue import RequestQueue
from penstock.engine.shared.orders import GONE
from penstock.engine.streams import Streams
from penstock.messages import Clock, EngineError


class HubLink:
    """The EngineLink to a hub, which executes control messages and starts the engine again when it ends: here, streams
    only pause."""

    def __init__(
        self,
        mux: Mux,
        version: int,
        clock: Clock = time.monotonic,
        *,
        gone: Callable[[], str] = lambda: GONE,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """`version` is the channel of the model's version. `clock` is the client's. `gone` returns why the connection
        was lost. `leave` is called when the link is closed."""
        self._gone, self._leave = gone, leave
        self._channel = mux.open(version, self._take, self._lost)
        self._clock = clock
        self._streams: Streams | None = None  # until the engine is there
        self._client: asyncio.Future[StreamingClient] = asyncio.get_running_loop().create_future()

    async def client(self) -> StreamingClient:
        """Return the client of the engine when that is there. Raises EngineError if it will not be."""
        return await self._client

    def send(self, frame: bytes) -> None:
        self._channel.send(frame)

    def kill(self) -> None:
        """The engine is not this process's to end."""

    async def close(self) -> None:
        """Leave the hub, which aborts what is unfinished. Streams still open end with EngineError."""
        self._end("the engine is closed")
        self._channel.send(encode(Stop("the process needs the version no longer")))
        self._channel.close()
        self._leave()

    def _take(self, frame: bytes) -> None:
        try:
            event = decode_event(frame)
        except msgspec.DecodeError as error:
            self._end(f"{self._gone() or GONE}, or is of another version: {error}")
            return
        if isinstance(event, SharedState):
            self._follow(event)
        elif self._streams is not None:
            self._streams.take(event)

    def _follow(self, shared: SharedState) -> None:
        if self._streams is None:
            if self._client.done():  # the caller has given up
                return
            self._begin(shared)
        assert self._streams is not None
        self._client.result().info = shared.info
        if shared.state.status != "ended":  # that comes with its reason, after the last deltas
            self._streams.follow(shared.state)

    def _begin(self, shared: SharedState) -> None:
        queue = RequestQueue(
            max_num_seqs=shared.info.max_num_seqs,
            max_waiting=shared.max_waiting,
            max_waiting_tokens=shared.max_waiting_tokens,
            clock=self._clock,
        )
        self._streams = Streams(incarnation=None, queue=queue)
        self._streams.take(Ready(shared.info, shared.stats))
        self._client.set_result(StreamingClient(shared.info, self, self._streams, None, clock=self._clock))

    def _lost(self) -> None:
        self._end(self._gone())

    def _end(self, reason: str) -> None:
        if self._streams is not None:
            self._streams.end(reason)
        elif not self._client.done():
            self._client.set_exception(EngineError(reason))
            self._client.exception()  # else asyncio logs an error that no caller takes
