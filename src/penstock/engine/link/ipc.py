"""An engine in a process of its own: its start, the messages to and from it, its end.

The two processes share a pair of sockets, one end each from their start: there is no address at which anybody else
could connect, and no death of either side leaves a file.
"""

import asyncio
import contextlib
import os
from collections.abc import Collection, Sequence

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.child import how_it_ended
from penstock.engine.client import CLOSE_SECONDS, EngineLink, StreamingClient
from penstock.engine.link.engine_child import ENGINE, EngineChild
from penstock.engine.link.frames import Frames
from penstock.engine.link.wire import Stop, decode_event, encode
from penstock.engine.pace import Pace
from penstock.engine.queue import RequestQueue
from penstock.engine.streams import Streams
from penstock.messages import EngineError, EngineInfo

EVENTS_AT_ONCE = 16  # read before other callbacks of the event loop run


async def spawn(
    config: EngineConfig,
    command: Sequence[str] = ENGINE,
    *,
    resumes: bool = False,
    processors: Collection[int] | None = None,
) -> StreamingClient:
    """Start an engine process and wait until it is ready. Raises EngineError with the reason when it does not. It may
    run on `processors`; None: on those of this thread."""
    return await connect(config, _start(config, command, processors), resumes=resumes, processors=processors)


async def connect(
    config: EngineConfig, spawned: EngineChild, *, resumes: bool = False, processors: Collection[int] | None = None
) -> StreamingClient:
    """Take over a process that was sent `config`, and wait until it is ready. Raises EngineError as `spawn` does.

    If the client `resumes`, it starts the engine again when that ends, and goes on with the requests. The engine may
    then run on `processors`; None: on those that this thread has now, as the caller may keep off some of them later.
    """
    cpus = os.sched_getaffinity(0) if processors is None else processors
    streams = Streams(incarnation=config.incarnation, queue=RequestQueue.of(config))

    async def restart(incarnation: int) -> tuple[EngineInfo, EngineLink]:
        following = msgspec.structs.replace(config, incarnation=incarnation)
        return await _ready(_start(following, spawned.command, cpus), streams)

    info, process = await _ready(spawned, streams)
    pace = Pace(config.max_num_batched_tokens, config.step_deadline)
    return StreamingClient(info, process, streams, pace, restart=restart if resumes else None)


def _start(config: EngineConfig, command: Sequence[str], processors: Collection[int] | None) -> EngineChild:
    try:
        spawned = EngineChild(command, processors=processors)
    except OSError as error:
        raise EngineError(f"the engine process could not be started: {error}") from error
    spawned.send_config(config)
    return spawned


async def _ready(spawned: EngineChild, streams: Streams) -> tuple[EngineInfo, "EngineProcess"]:
    process = EngineProcess(spawned, streams)
    try:
        return await streams.info, process
    except BaseException:
        process.kill()
        await process.ended()
        raise


class EngineProcess:
    """An engine process and the connection to it; an EngineLink. Its events and its end go into `streams`."""

    def __init__(self, spawned: EngineChild, streams: Streams) -> None:
        self._process = spawned.process
        self._frames = Frames(spawned.socket)
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()  # and everything held is released
        with contextlib.ExitStack() as held:
            held.push(spawned.take_over())
            self._pidfd = os.pidfd_open(self._process.pid)
            held.callback(os.close, self._pidfd)
            for descriptor, callback in ((self._pidfd, self._exited), (self._frames.fileno(), self._read)):
                self._loop.add_reader(descriptor, callback)
                held.callback(self._loop.remove_reader, descriptor)
            self._held = held.pop_all()

    def send(self, frame: bytes) -> None:
        """Send, or buffer what the socket does not take: a number of bytes bounded by the streams' limit."""
        if self._ended.is_set():
            return
        self._frames.send(frame)
        if self._frames.unsent:
            self._loop.add_writer(self._frames.fileno(), self._write)

    def kill(self) -> None:
        self._process.kill()

    async def ended(self) -> None:
        """Wait until the process has ended and everything of it is released."""
        await self._ended.wait()

    async def close(self) -> None:
        self.send(encode(Stop("the engine is closed")))
        try:
            await asyncio.wait_for(self.ended(), CLOSE_SECONDS)
        except TimeoutError:
            self.kill()
            await self.ended()
        except asyncio.CancelledError:
            self.kill()
            raise

    def _write(self) -> None:
        if self._frames.flush():
            self._loop.remove_writer(self._frames.fileno())

    def _read(self) -> None:
        """Take a bounded number of the events received."""
        if not self._ended.is_set() and self._take(EVENTS_AT_ONCE):
            self._loop.call_soon(self._read)  # more may be in the buffer, which makes nothing readable

    def _take(self, most: int) -> bool:
        """Take up to `most` events. Returns True when there were as many."""
        try:
            frames = self._frames.receive(most)
            for frame in frames:
                self._streams.take(decode_event(frame))
        except EOFError:  # the process ends, and its pidfd reports that
            self._loop.remove_reader(self._frames.fileno())
            return False
        except msgspec.DecodeError as error:
            self._streams.fail(
                f"the engine process sent a message that cannot be read; is it of another version? {error}"
            )
            self.kill()
            return False
        return len(frames) == most

    def _exited(self) -> None:
        """The process has ended: take its last events, then end all streams."""
        self._loop.remove_reader(self._pidfd)
        status = self._process.wait()
        while self._take(EVENTS_AT_ONCE):
            pass
        self._streams.fail(f"the engine process {how_it_ended(status)}")
        self._loop.remove_writer(self._frames.fileno())
        self._held.close()
        self._ended.set()
