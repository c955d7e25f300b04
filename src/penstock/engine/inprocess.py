"""An engine on a thread of this process: for tests, one-off generation and benchmarks."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from penstock.config.engine import EngineConfig
from penstock.engine.client import CLOSE_SECONDS, StreamingClient
from penstock.engine.link.channel import COMMANDS_AT_ONCE
from penstock.engine.link.commands import CommandReader
from penstock.engine.link.merge import StepBuffer
from penstock.engine.link.wire import Command, Ended, Event, Ready, Refused, Step, Stop, encode
from penstock.engine.main import MODEL_BACKEND, EngineBackend, run_engine
from penstock.engine.pace import Pace
from penstock.engine.queue import RequestQueue
from penstock.engine.streams import Streams
from penstock.messages import Clock

log = logging.getLogger(__name__)


async def start_thread(
    config: EngineConfig, backend: EngineBackend = MODEL_BACKEND, clock: Clock = time.monotonic
) -> StreamingClient:
    """Start an engine on a thread and wait until it is ready. EngineError gives the reason where that fails.

    `clock` is the client's; the engine has its own.
    """
    streams = Streams(incarnation=config.incarnation, queue=RequestQueue.of(config, clock))
    thread = EngineThread(config, backend, streams)
    try:
        info = await streams.info
    except BaseException:
        await thread.close()
        raise
    pace = Pace(config.max_num_batched_tokens, config.step_deadline)
    return StreamingClient(info, thread, streams, pace, clock=clock)


class QueueChannel:
    """A Channel between two threads. Commands are encoded, so that they are checked as between processes."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify  # called from the engine's thread once for all that `take` returns next
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = CommandReader(time.monotonic)
        self._lock = threading.Lock()
        self._steps = StepBuffer()
        self._announced: list[Ready | Ended] = []

    def put(self, frame: bytes) -> None:
        """For the client: send a command."""
        self._commands.put(frame)

    def take(self) -> list[Event]:
        """For the client: return the events since the last call."""
        with self._lock:
            events: list[Event] = [self._steps.take()] if self._steps else []
            events += self._announced
            self._announced.clear()
        return events

    def receive(self, *, wait: float) -> list[Command | Refused]:
        frames = []
        with contextlib.suppress(queue.Empty):
            if wait > 0.0:
                frames.append(self._commands.get(timeout=wait))
            while len(frames) < COMMANDS_AT_ONCE:
                frames.append(self._commands.get_nowait())
        return [command for frame in frames if frame and (command := self._reader.read(frame)) is not None]

    def waker(self) -> Callable[[], None]:
        """See Channel. An empty frame is no command."""
        return lambda: self._commands.put(b"")

    def post(self, step: Step) -> None:
        with self._lock:
            first = not self._steps and not self._announced
            self._steps.push(step)
        if first:
            self._notify()

    def announce(self, event: Ready | Ended) -> None:
        with self._lock:
            first = not self._steps and not self._announced
            self._announced.append(event)
        if first:
            self._notify()


class EngineThread:
    """An engine on a daemon thread; an EngineLink. A step in progress cannot be ended from outside."""

    def __init__(self, config: EngineConfig, backend: EngineBackend, streams: Streams) -> None:
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._channel = QueueChannel(lambda: self._call(self._read))
        self._thread = threading.Thread(target=self._run, args=(config, backend), name="engine", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        self._channel.put(frame)

    def kill(self) -> None:
        self.send(encode(Stop("the engine was given up")))

    async def close(self) -> None:
        self.send(encode(Stop("the engine is closed")))
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            log.warning("the engine's thread is still in a step after %g s; it is left running", CLOSE_SECONDS)

    def _run(self, config: EngineConfig, backend: EngineBackend) -> None:
        try:
            run_engine(config, backend, self._channel)
        finally:
            self._call(self._finish)

    def _call(self, callback: Callable[[], None]) -> None:
        """From the engine's thread: call something on the client's event loop, or stop if that is closed."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self.kill()

    def _read(self) -> None:
        for event in self._channel.take():
            self._streams.take(event)

    def _finish(self) -> None:
        self._read()
        self._streams.fail("the engine's thread has ended")
        self._thread.join()
        self._ended.set()
