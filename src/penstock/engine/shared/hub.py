"""Shares one engine among API processes, in the process that starts them and the engine, or among the fronts of a
fleet, in the process of `penstock engine`.

They speak to the hub over a socket, as to an engine. So this process alone keeps track of which engine runs, which
requests a new engine must get, and how many requests wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec.structs import replace

from penstock.engine.client import StreamingClient
from penstock.engine.link.commands import CommandReader
from penstock.engine.link.merge import StepBuffer
from penstock.engine.link.mux import Mux
from penstock.engine.link.wire import (
    Abort,
    Add,
    Control,
    ControlReply,
    Ended,
    Event,
    Finish,
    Rejected,
    SharedState,
    Step,
    Stop,
    encode,
)
from penstock.engine.shared.orders import answered
from penstock.messages import (
    BlockChanges,
    ControlAnswer,
    ControlMessage,
    EngineError,
    EngineStats,
    GenerateRequest,
    Stream,
    TokenDelta,
    WatchBlocks,
)
from penstock.tasks import spawn

MOST_CLOSED = 4096  # aborted requests that are remembered
TICK_SECONDS = 0.25  # between statistics for processes that have no streams

_NONE = EngineStats()
Operate = Callable[[ControlMessage], Awaitable[ControlAnswer]]  # executes a message. Raises ValueError or EngineError
log = logging.getLogger(__name__)


class ApiConnection:
    """The connection of one API process: its channel and its open streams."""

    def __init__(self, hub: "Hub", mux: Mux, operate: Operate) -> None:
        self._hub = hub
        self._operate = operate
        self._reader = CommandReader(hub.client.clock)
        self._channel = mux.open(hub.version, self._take, self.close, self._drained)
        self._late = StepBuffer()  # what a process that does not read has not received
        self._out = Step()  # the next message
        self._streams: dict[str, Stream] = {}
        self._waiting: set[str] = set()  # streams that were not reported as begun
        self._changed: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reports: Literal["none", "asked", "sent"] = "none"  # of blocks; asked: the first has not come yet

    @property
    def open(self) -> bool:
        """True until the process has ended or left the version."""
        return self._channel.open

    @property
    def requests(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    def send(self, event: Event) -> None:
        self._channel.send(encode(event))

    def post(self, stats: EngineStats, *, always: bool) -> None:
        """Send what is new. With `always`, send the statistics even if nothing else is."""
        out, changed = self._out, self._changed
        if not (changed or always or out.deltas or out.rejected or out.aborted or out.replies or out.blocks):
            return
        self._changed = {}
        for name, stream in changed.items():
            if stream.begun and name in self._waiting:
                self._waiting.discard(name)
                out.begun.append(name)
            out.deltas.extend(stream.take())
            if stream.error is not None:
                out.rejected.append(Rejected.of(name, stream.error))
            if stream.error is not None or not stream.in_engine:
                self._release(name)
        self._out = Step()
        step = Step(stats, out.deltas, out.rejected, out.aborted, out.replies, out.begun, out.blocks)
        if self._channel.behind or self._late:  # another channel's frame may have found room before `_drained` ran
            self._late.push(step)
        else:
            self.send(step)

    def report(self, changes: BlockChanges) -> None:
        """Pass on a report of blocks if the process reads them."""
        if self._reports == "asked" and changes.number == 1:
            self._reports = "sent"
        if self._reports == "sent":
            self._out.blocks.append(changes)
            self._hub.flush_soon()

    def end(self, reason: str) -> None:
        """Send that the engine has ended for good, after all that was posted."""
        self._drained()
        self.send(Ended(reason))

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
            self.send(self._late.take())

    def _take(self, frame: bytes) -> None:
        match self._reader.read(frame):
            case Add(request):
                self._add(request)
            case Finish(name, choice, reason, keep):
                if name in self._streams:
                    self._hub.client.finish(name, choice, reason, keep)
            case Abort(name):
                self._abort(name)
            case Control() as command:
                if isinstance(command.message, WatchBlocks):
                    self._reports = "asked"
                spawn(self._tasks, self._control(command))
            case Rejected() as rejected:
                self._out.rejected.append(rejected)
                self._hub.flush_soon()
            case ControlReply() as reply:
                self._out.replies.append(reply)
                self._hub.flush_soon()
            case Stop():
                self.close()

    def _add(self, request: GenerateRequest) -> None:
        name = request.request_id
        try:
            stream = self._hub.client.open(request)
        except (ValueError, EngineError) as error:
            self._out.rejected.append(Rejected.of(name, error))
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

    def add_last(self, delta: TokenDelta) -> None:
        """Send the end of a choice that the process has aborted."""
        self._out.deltas.append(delta)
        self._hub.flush_soon()

    def _abort(self, name: str) -> None:
        if (stream := self._streams.get(name)) is not None:
            self._hub.closed(name, self)
            self._out.deltas.extend([*stream.take(), *stream.aborted()])
            self._release(name)
        self._out.aborted.append(name)
        self._hub.flush_soon()

    def _release(self, name: str) -> None:
        self._waiting.discard(name)
        self._changed.pop(name, None)
        self._hub.client.release(self._streams.pop(name))

    async def _control(self, command: Control) -> None:
        reply = await answered(command.serial, self._operate(command.message))
        self._out.replies.append(reply)  # not one expression: `_out` is another one by now
        self._hub.flush_soon()


class Hub:
    """The connections of API processes to one engine, which serves one version of the model."""

    def __init__(self, client: StreamingClient, version: int = 1) -> None:
        """`version` is the number of the connections' channel."""
        self.client, self.version = client, version
        self.on_step: Callable[[EngineStats], object] = lambda stats: None  # gets the statistics when they have changed
        self._connections: set[ApiConnection] = set()
        self._left = asyncio.Event()
        self._stats = client.stats()
        self._ended = False
        self._flushing = False
        self.leave_within: float | None = None  # seconds that requests may stay; None: the engine takes new ones
        self._counted = (self._stats, self._stats)  # of the engine, and with the tokens that wait
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self._closed: dict[str, ApiConnection] = {}  # requests that were aborted, until the engine has ended them
        self._state = self._look()
        client.on_change(self.flush_soon)
        client.on_blocks(self._report)
        client.watch_ends(self._take_last)

    @property
    def requests(self) -> int:
        """The number of open streams of all processes."""
        return sum(connection.requests for connection in self._connections)

    def connect(self, mux: Mux, operate: Operate) -> ApiConnection:
        """Return the connection of an API process. `operate` executes its control messages."""
        connection = ApiConnection(self, mux, operate)
        self._connections.add(connection)
        connection.send(replace(self._state, stats=self.client.stats()))
        return connection

    def forget(self, connection: ApiConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._left.set()

    async def left(self) -> None:
        """Return when no process uses the version. For a version that no process will join."""
        if self._connections:
            await self._left.wait()

    def closed(self, name: str, connection: ApiConnection) -> None:
        """Note that a request was aborted. Its process gets what the engine says of its end."""
        self._closed[name] = connection
        if len(self._closed) > MOST_CLOSED:
            del self._closed[next(iter(self._closed))]

    def flush_soon(self) -> None:
        """Send what is new, once for all that changes in this round of the event loop."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _take_last(self, delta: TokenDelta) -> None:
        connection = self._closed.get(delta.request_id)
        if connection is not None and connection.open:
            connection.add_last(delta)

    def close(self) -> None:
        """Close all connections. The engine goes on."""
        self._timer.cancel()
        for connection in list(self._connections):
            connection.close()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self._flush(always=self._stats is not self.client.stats())

    def _flush(self, *, always: bool = False) -> None:
        self._flushing = False
        if (state := self._look()) != self._state:
            self._state = state
            for connection in self._connections:
                connection.send(state)
        stats = self.client.stats()
        if always:
            self._stats = stats
        self.on_step(stats)
        stats = self._with_tokens(stats)
        for connection in list(self._connections):
            connection.post(stats, always=always)
        if self.client.failure and not self._ended:
            self._ended = True
            for connection in self._connections:
                connection.end(self.client.failure)

    def _report(self, changes: BlockChanges) -> None:
        for connection in self._connections:
            connection.report(changes)

    def _with_tokens(self, stats: EngineStats) -> EngineStats:
        """Return the statistics with the number of prompt tokens that wait."""
        if self._counted[0] is not stats:
            self._counted = stats, replace(stats, waiting_tokens=self.client.queue.tokens)
        return self._counted[1]

    def _look(self) -> SharedState:
        client, queue = self.client, self.client.queue
        state = client.state
        if self.leave_within is not None:
            state = replace(state, leave_within=self.leave_within)
        return SharedState(client.info, _NONE, state, queue.max_waiting, queue.max_waiting_tokens)
