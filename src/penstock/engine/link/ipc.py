"""Runs an engine in a separate process: starts it, exchanges messages with it, and reports its end.

The two processes exchange messages over a socket pair, which is made before the engine process starts. So no other
process can connect, and no socket file is left if either process dies.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Collection, Sequence

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.child import how_it_ended
from penstock.engine.client import CLOSE_SECONDS, EngineLink, StreamingClient
from penstock.engine.link.connection import Connection
from penstock.engine.link.engine_child import ENGINE, REPLACEMENT, EngineChild
from penstock.engine.link.wire import Stop, decode_event, encode
from penstock.engine.pace import Pace
from penstock.engine.queue import RequestQueue
from penstock.engine.streams import Streams
from penstock.messages import Clock, EngineError, EngineInfo
from penstock.observe.processes import usage

IDLE_SECONDS = 120.0  # without processor time after which an engine that starts counts as hung
LOOK_SECONDS = 1.0  # between looks at its processor time


async def spawn(
    config: EngineConfig,
    command: Sequence[str] = ENGINE,
    *,
    resumes: bool = False,
    processors: Collection[int] | None = None,
    clock: Clock = time.monotonic,
) -> StreamingClient:
    """Returns a client of a new engine process, once the engine is ready. Raises EngineError with the reason if not.

    The process may run on `processors`; None: on those of this thread. `resumes` and `clock` are as in `connect`.
    """
    child = _start(config, REPLACEMENT if config.replaces and config.lease is not None else command, processors)
    return await connect(config, child, resumes=resumes, processors=processors, clock=clock)


async def connect(
    config: EngineConfig,
    child: EngineChild,
    *,
    resumes: bool = False,
    processors: Collection[int] | None = None,
    clock: Clock = time.monotonic,
) -> StreamingClient:
    """Returns a client of `child`, which already has `config`, once its engine is ready. Raises EngineError as `spawn`.

    With `resumes`, the client starts a new process when the engine's process ends, and continues the requests. The new
    process may run on `processors`; None: on those that this thread has now. `clock` is the client's; the engine has
    its own.
    """
    # They are read now because the caller may give up one of them later, for the engine (`keep_off`).
    cpus = os.sched_getaffinity(0) if processors is None else processors
    streams = Streams(incarnation=config.incarnation, queue=RequestQueue.of(config, clock))

    async def restart(incarnation: int) -> tuple[EngineInfo, EngineLink]:
        following = msgspec.structs.replace(config, incarnation=incarnation, replaces=False)
        return await _ready(_start(following, ENGINE if child.command == REPLACEMENT else child.command, cpus), streams)

    info, process = await _ready(child, streams)
    pace = Pace(config.max_num_batched_tokens, config.step_deadline)
    return StreamingClient(info, process, streams, pace, clock=clock, restart=restart if resumes else None)


def _start(config: EngineConfig, command: Sequence[str], processors: Collection[int] | None) -> EngineChild:
    try:
        child = EngineChild(command, processors=processors)
    except OSError as error:
        raise EngineError(f"the engine process could not be started: {error}") from error
    child.send_config(config)
    return child


async def _ready(child: EngineChild, streams: Streams) -> tuple[EngineInfo, "EngineProcess"]:
    process = EngineProcess(child, streams)
    watching = asyncio.create_task(_watch_start(process, streams))
    try:
        return await streams.info, process
    except BaseException:
        process.kill()
        await process.ended()
        raise
    finally:
        watching.cancel()


async def _watch_start(process: "EngineProcess", streams: Streams) -> None:
    """Ends the start of an engine whose process, with its children, uses no processor time for IDLE_SECONDS. A model
    may take any time to load, but then it uses some."""
    used, looks = process.processor_seconds(), 0
    while looks < IDLE_SECONDS / LOOK_SECONDS:  # counted, so that time in which this process was stopped is left out
        await asyncio.sleep(LOOK_SECONDS)
        before, used = used, process.processor_seconds()
        looks = looks + 1 if used == before else 0
    streams.fail(
        f"the engine process used no processor time for {IDLE_SECONDS:g} s while it started, and was given up: it was "
        "stopped, or waits for a disk, a device or a lock"
    )
    process.kill()


class EngineProcess:
    """The EngineLink to an engine process. It passes the engine's events, and the end of the process, to `streams`."""

    def __init__(self, child: EngineChild, streams: Streams) -> None:
        self._process = child.process
        self._streams = streams
        self._ended = asyncio.Event()  # set when the process has ended and `_held` is closed
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as held:
            held.push(child.take_over())
            self._pidfd = os.pidfd_open(self._process.pid)
            held.callback(os.close, self._pidfd)
            loop.add_reader(self._pidfd, self._exited)
            held.callback(loop.remove_reader, self._pidfd)
            self._connection = Connection(child.socket, self._take)  # it need not report its end: the pidfd does
            held.callback(self._connection.close)
            self._held = held.pop_all()

    def send(self, frame: bytes) -> None:
        """Sends a frame. Bytes that the socket does not accept yet are buffered; the streams' limit bounds how many."""
        self._connection.send(frame)

    def kill(self) -> None:
        self._process.kill()

    def processor_seconds(self) -> float:
        """The processor time of the process and its children."""
        found = usage(self._process.pid)
        return 0.0 if found is None else found[1]

    async def ended(self) -> None:
        """Returns when the process has ended and its sockets and descriptors are closed."""
        await self._ended.wait()

    async def close(self) -> None:
        self.send(encode(Stop("the engine is closed")))
        try:
            async with asyncio.timeout(CLOSE_SECONDS):  # asyncio.wait_for in Python 3.11 can lose a cancellation
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
        """Runs when the process has ended: reads its last events, ends all streams and closes everything."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        status = self._process.wait()
        self._connection.read_rest()
        self._streams.fail(f"the engine process {how_it_ended(status)}")
        self._held.close()
        self._ended.set()
