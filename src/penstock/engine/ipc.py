"""The way to an engine in a process of its own: start it, talk to it, notice its end, leave nothing behind.

The two processes share one connection, made through a socket file (mode 0600) in a private directory (mode 0700). Both
are removed once the connection stands: nobody else can connect, and no death of either side leaves a file.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec
import zmq

from penstock.config.engine import EngineConfig
from penstock.engine.child import SOCKET_NAME, STDERR, how_it_ended, private_directory
from penstock.engine.client import CLOSE_SECONDS, StreamingClient
from penstock.engine.streams import Streams
from penstock.engine.wire import Hello, Stop, decode_event, encode
from penstock.messages import EngineError

# -P keeps the working directory, which may be a model's, out of the module search path.
ENGINE = (sys.executable, "-P", "-m", "penstock.engine.process")
LAST_WORDS_SECONDS = 0.25  # for the reason of an engine that has exited to arrive
EVENTS_IN_FLIGHT = 64  # that may wait in the socket; an engine merges what is more
EVENTS_AT_ONCE = 16  # read before other callbacks of the loop get their turn


async def spawn(config: EngineConfig, command: Sequence[str] = ENGINE) -> StreamingClient:
    """Start an engine process and wait until it is ready. EngineError gives the reason where it does not get there."""
    streams = Streams(incarnation=config.incarnation, limit=config.max_num_seqs + config.max_waiting)
    try:
        process = EngineProcess(config, command, streams)
    except (OSError, zmq.ZMQError) as error:
        raise EngineError(f"the engine process could not be started: {error}") from error
    try:
        info = await streams.info
    except BaseException:
        process.kill()
        await process.ended()
        raise
    return StreamingClient(info, process, streams, step_deadline=config.step_deadline)


class EngineProcess:
    """An engine process and the connection to it; a Link. Its events and its end go into `streams`."""

    def __init__(self, config: EngineConfig, command: Sequence[str], streams: Streams) -> None:
        self._config = config
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()  # and everything held is released
        self._held = contextlib.ExitStack()
        try:
            endpoint = self._listen()
            self._start([*command, endpoint])
        except BaseException:
            self._held.close()
            raise

    def send(self, frame: bytes) -> None:
        if self._ended.is_set():
            return
        # No peer means that it has just died, which the process' end will tell.
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)
        # Sending may swallow the edge by which the socket's descriptor tells of something to read.
        self._loop.call_soon(self._read)

    def kill(self) -> None:
        self._process.kill()

    async def ended(self) -> None:
        """Wait until the process is gone and nothing of it is left."""
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

    def _listen(self) -> str:
        """Bind the socket; its endpoint."""
        directory = private_directory()
        self._held.callback(shutil.rmtree, directory, ignore_errors=True)
        self._directory = directory
        context = zmq.Context()
        self._held.callback(context.term)
        self._socket = context.socket(zmq.DEALER)
        self._held.callback(self._socket.close, 0)
        self._socket.sndhwm = 0  # bounded by the streams' limit
        self._socket.rcvhwm = EVENTS_IN_FLIGHT
        path = directory / SOCKET_NAME
        self._socket.bind(f"ipc://{path}")
        path.chmod(0o600)
        self._watch(self._socket.fileno(), self._read)
        return f"ipc://{path}"

    def _start(self, command: Sequence[str]) -> None:
        stdin, self._lifeline = os.pipe()
        self._held.callback(os.close, self._lifeline)
        with open(stdin, "rb") as pipe:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=STDERR)
        self._held.callback(self._reap)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._held.callback(os.close, self._pidfd)
        self._watch(self._pidfd, self._exited)

    def _watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._loop.add_reader(descriptor, callback)
        self._held.callback(self._loop.remove_reader, descriptor)

    def _reap(self) -> None:
        """Kills only where starting up was interrupted: else the process is known to have ended."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        """Take some of the events that have come."""
        if self._ended.is_set():
            return
        for _ in range(EVENTS_AT_ONCE):
            if not self._read_one():
                return
        self._loop.call_soon(self._read)  # the descriptor tells only of what comes after

    def _read_one(self) -> bool:
        try:
            event = decode_event(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return False
        except msgspec.DecodeError as error:
            self._streams.fail(f"the engine process sent what cannot be read, is it of another version? {error}")
            self.kill()
            return False
        if isinstance(event, Hello):
            self._connected()
        else:
            self._streams.take(event)
        return True

    def _connected(self) -> None:
        """The socket file has served its purpose; now the engine may know what it shall run."""
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):  # its end is about to be noticed
            os.write(self._lifeline, msgspec.json.encode(self._config) + b"\n")

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = self._process.wait()
        if status < 0 or self._streams.failure:
            self._finish(status)
        else:
            self._loop.call_later(LAST_WORDS_SECONDS, self._finish, status)

    def _finish(self, status: int) -> None:
        """The process is gone: pass on what it still said, then end everything that waits for it."""
        while self._read_one():
            pass
        self._streams.fail(f"the engine process {how_it_ended(status)}")
        self._held.close()
        self._ended.set()
