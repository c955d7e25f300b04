"""An engine in a process of its own: its start, the messages to and from it, its end.

The two processes share a pair of sockets, one end each from their start: no other process can connect, and no file is
left if either side dies.
"""

import asyncio
import contextlib
import os
from collections.abc import Collection, Sequence

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.child import how_it_ended
from penstock.engine.client import CLOSE_SECONDS, EngineLink, StreamingClient
from penstock.engine.link.connection import Connection
from penstock.engine.link.engine_child import ENGINE, EngineChild
from penstock.engine.link.wire import Stop, decode_event, encode
from penstock.engine.pace import Pace
from penstock.engine.queue import RequestQueue
from penstock.engine.streams import Streams
from penstock.messages import EngineError, EngineInfo


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
    config: EngineConfig, child: EngineChild, *, resumes: bool = False, processors: Collection[int] | None = None
) -> StreamingClient:
    """Take over a process that was sent `config`, and wait until it is ready. Raises EngineError as `spawn` does.

    If the client `resumes`, it starts the engine again when that ends, and goes on with the requests. The engine may
    then run on `processors`; None: on those that this thread has now, as the caller may keep off some of them later.
    """
    cpus = os.sched_getaffinity(0) if processors is None else processors
    streams = Streams(incarnation=config.incarnation, queue=RequestQueue.of(config))

    async def restart(incarnation: int) -> tuple[EngineInfo, EngineLink]:
        following = msgspec.structs.replace(config, incarnation=incarnation)
        return await _ready(_start(following, child.command, cpus), streams)

    info, process = await _ready(child, streams)
    pace = Pace(config.max_num_batched_tokens, config.step_deadline)
    return StreamingClient(info, process, streams, pace, restart=restart if resumes else None)


def _start(config: EngineConfig, command: Sequence[str], processors: Collection[int] | None) -> EngineChild:
    try:
        child = EngineChild(command, processors=processors)
    except OSError as error:
        raise EngineError(f"the engine process could not be started: {error}") from error
    child.send_config(config)
    return child


async def _ready(child: EngineChild, streams: Streams) -> tuple[EngineInfo, "EngineProcess"]:
    process = EngineProcess(child, streams)
    try:
        return await streams.info, process
    except BaseException:
        process.kill()
        await process.ended()
        raise


class EngineProcess:
    """An engine process and the connection to it; an EngineLink. Its events and its end go into `streams`."""

    def __init__(self, child: EngineChild, streams: Streams) -> None:
        self._process = child.process
        self._streams = streams
        self._ended = asyncio.Event()  # and everything held is released
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as held:
            held.push(child.take_over())
            self._pidfd = os.pidfd_open(self._process.pid)
            held.callback(os.close, self._pidfd)
            loop.add_reader(self._pidfd, self._exited)
            held.callback(loop.remove_reader, self._pidfd)
            self._connection = Connection(child.socket, self._take)  # the process's end is reported by its pidfd
            held.callback(self._connection.close)
            self._held = held.pop_all()

    def send(self, frame: bytes) -> None:
        """Send, or buffer what the socket does not take: a number of bytes bounded by the streams' limit."""
        self._connection.send(frame)

    def kill(self) -> None:
        self._process.kill()

    async def ended(self) -> None:
        """Wait until the process has ended and everything of it is released."""
        await self._ended.wait()

    async def close(self) -> None:
        self.send(encode(Stop("the engine is closed")))
        try:
            async with asyncio.timeout(CLOSE_SECONDS):  # wait_for of Python 3.11 may swallow a cancellation
                await self.ended()
        except TimeoutError:
            self.kill()
            await self.ended()
        except asyncio.CancelledError:
            self.kill()
            raise

    def _take(self, frame: bytes) -> None:
        try:
            event = decode_event(frame)
        except msgspec.DecodeError as error:
            self._streams.fail(
                f"the engine process sent a message that cannot be read; is it of another version? {error}"
            )
            self.kill()
        else:
            self._streams.take(event)

    def _exited(self) -> None:
        """The process has ended: take its last events, then end all streams."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        status = self._process.wait()
        self._connection.read_rest()
        self._streams.fail(f"the engine process {how_it_ended(status)}")
        self._held.close()
        self._ended.set()
