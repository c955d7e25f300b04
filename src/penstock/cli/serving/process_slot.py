"""The slot of one API process: the process that runs there now, and what those before it have left."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec

from penstock.cli.serving.api_process import ApiStart
from penstock.engine.link.engine_child import STDERR
from penstock.engine.link.mux import Mux
from penstock.engine.link.wire import Offer, Order
from penstock.engine.recovery import Starts
from penstock.engine.shared.hub import ApiConnection, Hub, Operate
from penstock.engine.shared.orders import ApiLink
from penstock.engine.signals import group_signals_blocked
from penstock.messages import EngineError
from penstock.observe.counts import Counts
from penstock.observe.processes import usage_of_one

COMMAND = (sys.executable, "-P", "-m", "penstock.cli.serving.api_process")
COUNT_SECONDS = 1.0  # that a process has to send what it has counted; after that its last counts are used
LOAD_SECONDS = 60.0  # that a process has to load a new version
LOOK_SECONDS = 5.0  # between looks whether it answers
MISSED_LOOKS = 6  # one after the other, after which it counts as hung; half a minute

_log = logging.getLogger("penstock.serve")


class ApiProcess:
    """An API process and this process's end of the socket pair to it."""

    def __init__(self, start: ApiStart, listening: socket.socket, lock: int) -> None:
        """Starts it. Raises OSError."""
        self.socket, other = socket.socketpair()
        fds = (other.fileno(), listening.fileno(), lock)
        with other, group_signals_blocked():
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, fds)],
                stdin=subprocess.PIPE,
                stdout=STDERR,
                pass_fds=[fd for fd in fds if fd >= 0],
            )
        assert self.process.stdin is not None
        with self.process.stdin as stdin, contextlib.suppress(BrokenPipeError):
            stdin.write(msgspec.json.encode(start) + b"\n")

    async def ended(self) -> int:
        """Returns the exit status when the process has ended."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self.process.pid)
        loop.add_reader(descriptor, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self.process.wait()


class ProcessSlot:
    """See the module. In a reload, the process gets one request at a time."""

    def __init__(self, start: ApiStart, listening: socket.socket, lock: int) -> None:
        """Starts the first process. Raises OSError."""
        self.start = start  # of the next process
        self.ready = asyncio.Event()  # once the first process answers requests
        self.counts: Counts = {}  # the last that the process has sent
        self.used = (0, 0.0)  # its resident bytes and processor seconds, as seen last
        self.hung = False  # the process that has ended was killed because it hung
        self.loaded = 0  # the version that the process can exchange the one that it serves for
        self._listening, self._lock = listening, lock
        self._starts = Starts(time.monotonic)
        self._asked = 0
        self._reply: asyncio.Future[str] | None = None  # to the last request
        self._mux: Mux | None = None
        self._link: ApiLink | None = None
        self._connections: dict[int, ApiConnection] = {}
        self.api = ApiProcess(start, listening, lock)

    @property
    def number(self) -> int:
        return self.start.number

    async def start_again(self) -> None:
        """Starts a process in the place of one that has ended. Raises EngineError if that happens too often."""
        delay = self._starts.delay()
        if delay is None:
            raise EngineError(f"API process {self.number} ended too often within a minute; the log above says why")
        await asyncio.sleep(delay)
        self.hung = False
        self.api = ApiProcess(msgspec.structs.replace(self.start, fresh=False), self._listening, self._lock)

    def connect(self, answer: Callable[[str], Awaitable[str]]) -> None:
        """Takes up the connection to the process that has been started. `answer` returns the reply to a request of the
        process."""
        self._mux = Mux(self.api.socket)
        self._link = ApiLink(self._mux, answer)

    @property
    def mux(self) -> Mux:
        """The connection that was taken up."""
        assert self._mux is not None
        return self._mux

    def join(self, hub: Hub, operate: Operate) -> None:
        """Connects the process to a version's engine. `operate` executes its control messages."""
        self._connections = {
            version: connection for version, connection in self._connections.items() if connection.open
        }
        if self._mux is not None:
            self._connections[hub.version] = hub.connect(self._mux, operate)

    def answers(self) -> None:
        """Call when the process answers requests."""
        self._starts.ready()
        self.ready.set()

    def leave(self, hub: Hub) -> None:
        """Closes that connection."""
        if (connection := self._connections.pop(hub.version, None)) is not None:
            connection.close()

    async def read_rest(self) -> None:
        """Takes what the process had sent before it ended: rows of the ledger among it."""
        if self._link is not None:
            await self._link.read_rest()

    def ended(self) -> tuple[Counts, float]:
        """Forgets the process that has ended. Returns what it had counted, and its processor seconds."""
        for connection in self._connections.values():
            connection.close()
        if self._link is not None:
            self._link.close()
        if self._mux is not None:
            self._mux.close()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(EngineError(f"API process {self.number} has ended; reload again"))
        counts, seconds = self.counts, self.used[1]
        if counts:
            counts["server"]["now"] = {}
        self._mux, self._link, self._connections, self.loaded = None, None, {}, 0
        self.counts, self.used = {}, (0, 0.0)
        return counts, seconds

    # -- what the process is sent -----------------------------------------------------------------------------

    def order(self, name: str) -> None:
        """Sends an order. It goes nowhere while no process runs."""
        if self._link is not None:
            self._link.send(Order(name))

    async def hold(self) -> None:
        """Lets the process hold new requests back, and returns when it answers none. Raises EngineError if it ends or
        does not answer requests yet."""
        error = await self._ask(lambda serial: Order(f"hold {serial}"))
        if error:
            raise EngineError(f"API process {self.number} cannot hold requests back: {error}")

    async def load(self, hub: Hub, operate: Operate, settings: bytes) -> None:
        """Lets the process load a version, and connects it to the engine of that version. Raises EngineError, with the
        reason, if it cannot."""
        reply = self._ask(lambda serial: Offer(serial, hub.version, settings))
        self.join(hub, operate)  # the process opens its end when it gets the offer
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                error = await reply
        except TimeoutError:
            error = f"it took more than {LOAD_SECONDS:g} s; reload again when the machine has less to do"
        if error:
            raise EngineError(f"API process {self.number} cannot load the new version: {error}")
        self.loaded = hub.version

    def _ask(self, order: Callable[[int], Order | Offer]) -> asyncio.Future[str]:
        if self._link is None:
            raise EngineError(f"API process {self.number} is being started again; reload when it answers")
        self._reply = asyncio.get_running_loop().create_future()
        self._asked += 1
        self._link.send(order(self._asked))
        return self._reply

    def reply(self, message: str) -> None:
        """Takes the process's answer to `hold` or `load`: the number of the request, and an error."""
        number, _, error = message.partition(" ")
        if self._reply is not None and not self._reply.done() and number == str(self._asked):
            self._reply.set_result(error)

    async def look(self) -> bool:
        """Takes the process's counts, and what it uses of the machine. Returns whether it has sent its counts."""
        self.used = usage_of_one(self.api.process.pid) or self.used
        if self._link is not None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(COUNT_SECONDS):
                    self.counts = msgspec.json.decode(await self._link.count())
                return True
        return False

    async def watch(self) -> None:
        """Kills the process when it hangs, since the connections that it has accepted, and that wait for it, would hang
        with it. It is watched from its first answer on. Looks are counted, and not seconds, so that the time in which
        this process itself was stopped is left out."""
        missed: int | None = None
        while missed is None or missed < MISSED_LOOKS:
            await asyncio.sleep(LOOK_SECONDS)
            if await self.look():
                missed = 0
            elif missed is not None:
                missed += 1
        seconds = MISSED_LOOKS * LOOK_SECONDS
        _log.error("API process %d has not answered its supervisor for %g s and is killed", self.number, seconds)
        self.hung = True
        self.api.process.kill()
