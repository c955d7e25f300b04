"""Shares one engine among API processes, in the process that starts them and the engine.

An API process speaks over a socket pair to here, as to an engine. So only this process knows which engine runs, which
requests a new one must be sent, and how many requests wait.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from penstock.engine.client import StreamingClient
from penstock.engine.link.connection import Connection
from penstock.engine.link.merge import StepBuffer
from penstock.engine.link.wire import (
    Abort,
    Add,
    Cause,
    Control,
    ControlReply,
    Counted,
    Ended,
    EngineState,
    Event,
    Finish,
    Order,
    Rejected,
    Step,
    Stop,
    decode_command,
    encode,
)
from penstock.engine.streams import Stream
from penstock.messages import DeadlineExceeded, EngineError, EngineStats, GenerateRequest, QueueFull

TICK_SECONDS = 0.25  # between statistics for processes that have no streams

_NONE = EngineStats()
log = logging.getLogger(__name__)


class Port:
    """One API process's place at the engine: its connection and its open streams."""

    def __init__(self, hub: "Hub", end: socket.socket, answer: Callable[[str], Awaitable[str]]) -> None:
        """`answer` gives the reply to an operator's command. Raises ValueError or EngineError."""
        self._hub = hub
        self._answer = answer
        self._connection = Connection(end, self._take, self.close, self._drained)
        self._late = StepBuffer()  # what a process that does not read has not got
        self._out = Step()  # the next message in the making
        self._streams: dict[str, Stream] = {}
        self._waiting: set[str] = set()  # streams that were not reported as begun
        self._changed: dict[str, Stream] = {}
        self._counts: asyncio.Future[bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, event: Event) -> None:
        """Send an event that is no step."""
        self._connection.send(encode(event))

    async def count(self) -> bytes:
        """Return what the process has counted. The caller bounds the time."""
        if self._counts is None or self._counts.done():
            self._counts = asyncio.get_running_loop().create_future()
            self.tell(Order("count"))
        return await asyncio.shield(self._counts)

    def post(self, stats: EngineStats, *, always: bool) -> None:
        """Send what is new. With `always`, send the statistics even if nothing else is."""
        out, changed = self._out, self._changed
        if not (changed or always or out.rejected or out.aborted or out.replies):
            return
        self._changed = {}
        for name, stream in changed.items():
            if stream.begun and name in self._waiting:
                self._waiting.discard(name)
                out.begun.append(name)
            out.deltas.extend(stream.take())
            if stream.error is not None:
                out.rejected.append(_rejected(name, stream.error))
            if stream.error is not None or not stream.in_engine:
                self._release(name)
        self._out = Step()
        step = Step(stats, out.deltas, out.rejected, out.aborted, out.replies, out.begun)
        if self._connection.behind:
            self._late.push(step)
        else:
            self.tell(step)

    def close(self) -> None:
        """Abort the requests of a process that has ended. May be called twice."""
        self._connection.close()
        for name in list(self._streams):
            self._release(name)
        for task in self._tasks:
            task.cancel()
        if self._counts is not None and not self._counts.done():
            self._counts.set_exception(EngineError("the API process has ended"))
            self._counts.exception()  # nobody may be waiting
        self._hub.forget(self)

    def _drained(self) -> None:
        if self._late:
            self.tell(self._late.take())

    def _take(self, frame: bytes) -> None:
        match decode_command(frame):
            case Add(request):
                self._add(request)
            case Finish(name, choice, reason, keep):
                if name in self._streams:
                    self._hub.client.finish(name, choice, reason, keep)
            case Abort(name):
                self._abort(name)
            case Control(serial, message):
                task = asyncio.create_task(self._control(serial, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Counted(counts):
                if self._counts is not None and not self._counts.done():
                    self._counts.set_result(counts)
            case Rejected() as rejected:
                self._out.rejected.append(rejected)
                self._hub.flush_soon()
            case Stop():
                self.close()

    def _add(self, request: GenerateRequest) -> None:
        name = request.request_id
        try:
            stream = self._hub.client.open(request)
        except (ValueError, EngineError) as error:
            self._out.rejected.append(_rejected(name, error))
            self._hub.flush_soon()
            return
        self._streams[name] = stream
        self._waiting.add(name)

        def notify() -> None:
            self._changed[name] = stream
            self._hub.flush_soon()

        stream.notify = notify
        if stream.error is not None or stream.begun:
            notify()

    def _abort(self, name: str) -> None:
        if (stream := self._streams.get(name)) is not None:
            self._out.deltas.extend([*stream.take(), *stream.aborted()])
            self._release(name)
        self._out.aborted.append(name)
        self._hub.flush_soon()

    def _release(self, name: str) -> None:
        self._waiting.discard(name)
        self._changed.pop(name, None)
        self._hub.client.release(self._streams.pop(name))

    async def _control(self, serial: int, message: str) -> None:
        try:
            reply = ControlReply(serial, await self._answer(message))
        except (ValueError, EngineError) as error:
            reply = ControlReply(serial, "", str(error), "engine" if isinstance(error, EngineError) else "request")
        self._out.replies.append(reply)
        self._hub.flush_soon()


class Hub:
    """The ports of one engine."""

    def __init__(self, client: StreamingClient, on_step: Callable[[EngineStats], None] = lambda stats: None) -> None:
        """`on_step` gets the statistics whenever they have changed."""
        self.client = client
        self._on_step = on_step
        self._ports: set[Port] = set()
        self._state = self._look()
        self._stats = client.stats()
        self._ended = False
        self._flushing = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        client.on_change(self.flush_soon)

    def connect(self, end: socket.socket, answer: Callable[[str], Awaitable[str]]) -> Port:
        """Return the port of a new API process, whose other end of the socket pair it has."""
        port = Port(self, end, answer)
        self._ports.add(port)
        port.tell(replace(self._state, stats=self.client.stats()))
        return port

    def forget(self, port: Port) -> None:
        self._ports.discard(port)

    def order(self, name: str) -> None:
        """Send all processes an order."""
        for port in self._ports:
            port.tell(Order(name))

    async def control(self, message: str) -> str:
        """Execute an operator's command. Raises ValueError or EngineError."""
        match message:
            case "sleep":
                await self.client.sleep()
            case "wake":
                await self.client.wake()
            case _:
                return await self.client.control(message)
        return ""

    def flush_soon(self) -> None:
        """Send what is new, once for all that changes in this round of the event loop."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close all ports. The engine goes on."""
        self._timer.cancel()
        for port in list(self._ports):
            port.close()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self._flush(always=self._stats is not self.client.stats())

    def _flush(self, *, always: bool = False) -> None:
        self._flushing = False
        if (state := self._look()) != self._state:
            self._state = state
            for port in self._ports:
                port.tell(state)
        stats = self.client.stats()
        if always:
            self._stats = stats
        self._on_step(stats)
        for port in list(self._ports):
            port.post(stats, always=always)
        if self.client.failure and not self._ended:
            self._ended = True
            for port in self._ports:
                port.tell(Ended(self.client.failure))

    def _look(self) -> EngineState:
        client, queue = self.client, self.client.queue
        limits = (queue.max_waiting, queue.max_waiting_tokens)
        return EngineState(client.info, _NONE, client.restarting, client.asleep, client.restarts, *limits)


def _rejected(name: str, error: Exception) -> Rejected:
    cause: Cause = "request"
    if isinstance(error, EngineError):
        cause = "engine"
    elif isinstance(error, DeadlineExceeded):
        cause = "deadline"
    elif isinstance(error, QueueFull):
        return Rejected(name, str(error), "queue", error.retry_after)
    return Rejected(name, str(error), cause)
