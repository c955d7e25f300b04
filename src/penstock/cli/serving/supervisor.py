"""Runs several API processes over one engine, which it starts again when they end. It speaks no HTTP itself.

Each process has a listening socket of its own on the one port, among which the kernel divides the connections. The
supervisor holds these sockets, too, so that connections to a process that ends wait for the one that replaces it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry

from penstock.cli.checks import check_tls
from penstock.cli.serving.api_process import ApiStart
from penstock.engine.child import how_it_ended
from penstock.engine.client import StreamingClient
from penstock.engine.link.engine_child import STDERR
from penstock.engine.recovery import Starts
from penstock.engine.shared.hub import Hub, Port
from penstock.engine.signals import group_signals_blocked
from penstock.frontend.http.server import CLOSE_SECONDS, handle_signals
from penstock.frontend.pages.server import load_of
from penstock.messages import EngineError
from penstock.observe.costs import CostModel
from penstock.observe.counts import Counts, add
from penstock.observe.metrics import Metrics
from penstock.observe.processes import usage_of_one

COMMAND = (sys.executable, "-P", "-m", "penstock.cli.serving.api_process")
COUNT_SECONDS = 1.0  # that a process has to send what it has counted; after that its last counts are used
MARGIN_SECONDS = 5.0  # beyond the time to drain, after which an API process is killed

log = logging.getLogger("penstock.serve")


def shared_port(sock: socket.socket, processes: int) -> list[socket.socket]:
    """Returns `sock`, which is bound, and more sockets with its address: one for each process. They do not listen yet.

    `sock` was bound alone, so no other server has the port.
    """
    sockets = [sock]
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    for _ in range(processes - 1):
        another = socket.socket(sock.family, sock.type, sock.proto)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        another.bind(sock.getsockname())
        sockets.append(another)
    return sockets


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
    """One of the API processes: the one that runs now, and what those before it have left."""

    def __init__(self, start: ApiStart, listening: socket.socket, lock: int) -> None:
        """Starts the first process. Raises OSError."""
        self.ready = asyncio.Event()  # once the first process answers requests
        self.port: Port | None = None
        self.counts: Counts = {}  # the last that the process has sent
        self.used = (0, 0.0)  # its resident bytes and processor seconds, as seen last
        self._start, self._listening, self._lock = start, listening, lock
        self._starts = Starts(time.monotonic)
        self.api = ApiProcess(start, listening, lock)

    @property
    def number(self) -> int:
        return self._start.number

    async def start_again(self) -> None:
        """Starts a process in the place of one that has ended. Raises EngineError if that happens too often."""
        delay = self._starts.delay()
        if delay is None:
            raise EngineError(f"API process {self.number} ended too often within a minute; the log above says why")
        await asyncio.sleep(delay)
        self.api = ApiProcess(msgspec.structs.replace(self._start, fresh=False), self._listening, self._lock)

    async def look(self) -> None:
        """Takes the process's counts, and what it uses of the machine."""
        self.used = usage_of_one(self.api.process.pid) or self.used
        if self.port is not None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(COUNT_SECONDS):
                    self.counts = msgspec.json.decode(await self.port.count())

    def leave(self) -> tuple[Counts, float]:
        """Forgets the process that has ended. Returns what it had counted, and its processor seconds."""
        counts, seconds = self.counts, self.used[1]
        if counts:
            counts["server"]["in_flight"] = 0
        self.port, self.counts, self.used = None, {}, (0, 0.0)
        return counts, seconds


class Supervisor:
    """The API processes of a server."""

    def __init__(self, start: ApiStart, sockets: Sequence[socket.socket], lock: int) -> None:
        """Starts a process for each listening socket. `lock` is the storage's, -1 if nothing is stored. Raises
        OSError."""
        self._server = start.answers.server
        self._name = self._server.served_model_name
        self._sockets = sockets
        self._slots = [
            ProcessSlot(msgspec.structs.replace(start, number=number), listening, lock)
            for number, listening in enumerate(sockets)
        ]
        self._gone: tuple[Counts, float] = ({}, 0.0)  # what processes that have ended had counted, and their seconds
        self._queue = {"refused": 0, "late": 0}  # of these, by the processes' queues
        self._stopping = False
        self._scraping = asyncio.Lock()

    def kill(self) -> None:
        """Ends all processes at once."""
        for slot in self._slots:
            slot.api.process.kill()

    async def run(
        self,
        client: StreamingClient,
        costs: CostModel | None,
        dropped_lines: Callable[[], int],
        ready: Callable[[], None],
    ) -> None:
        """Lets the processes answer until a signal, as `penstock.frontend.serve` does, and closes the engine. `ready`
        is called when all of them answer. Raises EngineError if the engine or a process ends for good."""
        self._client = client
        self._dropped_lines = dropped_lines
        self._metrics = Metrics(CollectorRegistry(), dropped_lines, self._usage)
        self._model = self._metrics.model(self._name, client, costs)
        self._tls = check_tls(self._server)
        if (tls := self._tls) is not None:
            self._metrics.certificate_end = lambda: tls.certificate.not_after
        self._hub = Hub(client, self._model.observe_steps)
        stopping, hurry = handle_signals(self._hang_up)
        keeping = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        waits = [asyncio.create_task(stopping.wait()), asyncio.create_task(self._announce(ready))]
        if self._server.sleep_after is not None:
            waits.append(asyncio.create_task(self._sleep_when_unused(self._server.sleep_after)))
        if tls is not None:
            waits.append(asyncio.create_task(tls.watch()))
        try:
            await asyncio.wait((waits[0], *keeping), return_when=asyncio.FIRST_COMPLETED)
            self._stopping = True
            if client.healthy:
                await self._drain(keeping, hurry)
            else:  # their streams end with an error, and then they do
                await asyncio.wait(keeping, timeout=CLOSE_SECONDS + MARGIN_SECONDS)
        finally:
            for task in waits:
                task.cancel()
            self.kill()
            failures = [result for result in await asyncio.gather(*keeping, return_exceptions=True) if result]
            self._hub.close()
            failure = client.failure
            await client.close()
        if failure:
            raise EngineError("the engine ended before the server was stopped; the log above says why")
        if failures:
            raise failures[0]

    async def _keep(self, slot: ProcessSlot) -> None:
        """Starts a process again whenever it ends before the server is stopped. Raises EngineError if that happens too
        often."""
        while True:
            slot.port = self._hub.connect(slot.api.socket, lambda message: self._answer(slot, message))
            status = await slot.api.ended()
            slot.port.close()
            counts, seconds = slot.leave()
            self._gone = add(self._gone[0], counts), self._gone[1] + seconds
            if self._stopping or self._client.failure:
                return
            log.error("API process %d %s; it is started again", slot.number, how_it_ended(status))
            await slot.start_again()

    async def _announce(self, ready: Callable[[], None]) -> None:
        for slot in self._slots:
            await slot.ready.wait()
        ready()

    async def _drain(self, keeping: Sequence[asyncio.Task[None]], hurry: asyncio.Event) -> None:
        """Lets the processes finish the requests in flight. Those that do not end in time are killed."""
        for sock in self._sockets:
            sock.close()  # the processes refuse new requests, and connections when they have ended
        self._hub.order("drain")
        hurried = asyncio.create_task(hurry.wait())
        ended = asyncio.gather(*keeping, return_exceptions=True)
        seconds = self._server.drain_timeout + CLOSE_SECONDS + MARGIN_SECONDS
        await asyncio.wait((ended, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if hurry.is_set():
            self._hub.order("hurry")
            await asyncio.wait((ended,), timeout=CLOSE_SECONDS + MARGIN_SECONDS)
        hurried.cancel()

    async def _hang_up(self) -> None:
        if self._tls is not None:
            self._hub.order("read_certificate")
            asyncio.get_running_loop().run_in_executor(None, self._tls.reload)
        log.info("SIGHUP: the model is not reloaded, as the server has several API processes (--api-processes)")

    async def _sleep_when_unused(self, seconds: float) -> None:
        client, used, steps = self._client, time.monotonic(), -1
        while True:
            if not client.idle or client.asleep or client.restarting or client.stats().steps != steps:
                used, steps = time.monotonic(), client.stats().steps
            elif time.monotonic() - used >= seconds:
                with contextlib.suppress(EngineError):  # a request has just come
                    await client.sleep()
                    log.info("%s is asleep: its engine has ended, and the next request starts it", self._name)
            await asyncio.sleep(min(seconds, 1.0))

    # -- what processes ask for -----------------------------------------------------------------------------------

    async def _answer(self, slot: ProcessSlot, message: str) -> str:
        """The reply to a command. Raises ValueError or EngineError."""
        command, _, argument = message.partition(" ")
        match command:
            case "ready":
                slot.ready.set()
            case "run_batches":
                self._hub.order("run_batches")
            case "metrics":
                await self._count()
                body, content_type = await asyncio.to_thread(self._metrics.scrape(argument))
                return f"{content_type}\n{body.decode()}"
            case "load":
                await self._count()
                return load_of(self._model).decode()
            case _:
                return await self._hub.control(message)
        return ""

    async def _count(self) -> None:
        """Brings the sums of all processes into the metrics."""
        async with self._scraping:
            await asyncio.gather(*(slot.look() for slot in self._slots))
            total = add(self._gone[0], {"server": {"dropped_lines": self._dropped_lines()}})
            for slot in self._slots:
                total = add(total, slot.counts)
            if "model" in total:
                self._model.load(total["model"])
                self._metrics.load(total["server"])
                queue, before = self._client.queue, self._queue
                self._queue = total["queue"]
                queue.refused += self._queue["refused"] - before["refused"]
                queue.late += self._queue["late"] - before["late"]

    def _usage(self) -> tuple[int, float]:
        """The resident bytes and processor seconds of this process and the API processes."""
        own = usage_of_one(os.getpid()) or (0, 0.0)
        used = [own, *(slot.used for slot in self._slots)]
        return sum(resident for resident, _ in used), self._gone[1] + sum(seconds for _, seconds in used)
