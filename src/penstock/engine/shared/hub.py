"""Shares one engine among API processes, in the process that starts them and the engine.

An API process speaks over a socket pair to here, as to an engine. So only this process knows which engine runs, which
requests a new one must be sent, and how many requests wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from penstock.engine.client import StreamingClient
from penstock.engine.link.merge import StepBuffer
from penstock.engine.link.mux import Mux
from penstock.engine.link.wire import (
    Abort,
    Add,
    Cause,
    Control,
    Ended,
    EngineState,
    Event,
    Finish,
    Rejected,
    Step,
    Stop,
    decode_command,
    encode,
)
from penstock.engine.shared.orders import answered
from penstock.engine.streams import Stream
from penstock.messages import DeadlineExceeded, EndsEngines, EngineError, EngineStats, GenerateRequest, QueueFull

TICK_SECONDS = 0.25  # between statistics for processes that have no streams

_NONE = EngineStats()
log = logging.getLogger(__name__)


class Port:
    """One API process's place at the engine: its connection and its open streams."""

    def __init__(self, hub: "Hub", mux: Mux, answer: Callable[[str], Awaitable[str]]) -> None:
        """`answer` gives the reply to an operator's command. Raises ValueError or EngineError."""
        self._hub = hub
        self._answer = answer
        self._channel = mux.open(hub.version, self._take, self.close, self._drained)
        self._late = StepBuffer()  # what a process that does not read has not got
        self._out = Step()  # the next message in the making
        self._streams: dict[str, Stream] = {}
        self._waiting: set[str] = set()  # streams that were not reported as begun
        self._changed: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> bool:
        """True until the process has ended or left the version."""
        return self._channel.open

    @property
    def requests(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    def tell(self, event: Event) -> None:
        """Send an event that is no step."""
        self._channel.send(encode(event))

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
        if self._channel.behind:
            self._late.push(step)
        else:
            self.tell(step)

    def close(self) -> None:
        """Abort the requests of a process that has ended or left the version. May be called twice."""
        self._channel.close()
        for name in list(self._streams):
            self._release(name)
        for task in self._tasks:
            task.cancel()
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
        reply = await answered(self._answer, serial, message)
        self._out.replies.append(reply)
        self._hub.flush_soon()


class Hub:
    """The ports of one engine, which serves one version of the model."""

    def __init__(self, client: StreamingClient, version: int = 1) -> None:
        """`version` is the channel of the ports."""
        self.client, self.version = client, version
        self.on_step: Callable[[EngineStats], object] = lambda stats: None  # gets the statistics when they have changed
        self._ports: set[Port] = set()
        self._left = asyncio.Event()
        self._state = self._look()
        self._stats = client.stats()
        self._ended = False
        self._flushing = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        client.on_change(self.flush_soon)

    @property
    def requests(self) -> int:
        """The number of open streams of all processes."""
        return sum(port.requests for port in self._ports)

    def connect(self, mux: Mux, answer: Callable[[str], Awaitable[str]]) -> Port:
        """Return the port of an API process. `answer` gives the reply to an operator's command."""
        port = Port(self, mux, answer)
        self._ports.add(port)
        port.tell(replace(self._state, stats=self.client.stats()))
        return port

    def forget(self, port: Port) -> None:
        self._ports.discard(port)
        if not self._ports:
            self._left.set()

    async def left(self) -> None:
        """Return when no process uses the version. For a version that no process will join."""
        if self._ports:
            await self._left.wait()

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
        self.on_step(stats)
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
    elif isinstance(error, EndsEngines):
        cause = "ends engines"
    elif isinstance(error, QueueFull):
        return Rejected(name, str(error), "queue", error.retry_after)
    return Rejected(name, str(error), cause)
