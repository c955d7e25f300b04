"""Runs several API processes over one engine, which it starts again when they end. It speaks no HTTP itself.

Each process has a listening socket of its own on the one port, among which the kernel divides the connections. The
supervisor holds these sockets, too, so that connections to a process that ends wait for the one that replaces it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry

from penstock.cli.operate.reload import Reloader
from penstock.cli.serving.api_process import ApiStart, ReloadReply
from penstock.cli.serving.process_slot import ProcessSlot
from penstock.cli.serving.processors import off_the_loop
from penstock.cli.serving.shared_versions import SharedModel, SharedVersions
from penstock.engine.child import how_it_ended
from penstock.engine.client import StreamingClient
from penstock.engine.shared.hub import Hub
from penstock.frontend.errors import APIError
from penstock.frontend.http.server import CLOSE_SECONDS, handle_signals
from penstock.frontend.limits import RequestLimits
from penstock.frontend.pages.server import load_of
from penstock.frontend.storage.database import storage_folder
from penstock.frontend.storage.room import StorageRoom
from penstock.frontend.tenants.books import LocalBooks
from penstock.frontend.versions.reloads import Reloads, Start
from penstock.messages import ControlAnswer, ControlMessage, EngineError, Sleep
from penstock.observe.costs import CostModel
from penstock.observe.counts import Counts, add
from penstock.observe.metrics import Metrics
from penstock.observe.processes import usage_of_one
from penstock.prepare.checks import check_tls

MARGIN_SECONDS = 5.0  # beyond the time to stop, after which an API process is killed

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


class Supervisor:
    """The API processes of a server."""

    def __init__(self, start: ApiStart, sockets: Sequence[socket.socket], lock: int) -> None:
        """Starts a process for each listening socket. `lock` is the storage's, -1 if nothing is stored. Raises
        OSError."""
        self._start, self._server = start, start.answers.server
        self._sockets = sockets
        self._slots = [
            ProcessSlot(msgspec.structs.replace(start, number=number), listening, lock)
            for number, listening in enumerate(sockets)
        ]
        self._gone: tuple[Counts, float] = ({}, 0.0)  # what processes that have ended had counted, and their seconds
        self._queues: dict[str, dict[str, int]] = {}  # for each model, what the processes' queues have refused
        self._stopping = False
        self._scraping = asyncio.Lock()
        self._tenants = LocalBooks(self._server) if self._server.tenants else None
        self._refusing = False  # what the processes know of `_refuse`

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
        reloader: Reloader | None = None,
    ) -> None:
        """Lets the processes answer until a signal, as `penstock.frontend.serve` does, and closes the engine. `ready`
        is called when all of them answer. Raises EngineError if the engine or a process ends for good."""
        self._dropped_lines = dropped_lines
        self._reloader = reloader
        self._metrics = Metrics(CollectorRegistry(), dropped_lines, self._usage, vllm_names=self._server.vllm_metrics)
        if (folder := storage_folder(self._server)) is not None:
            self._metrics.storage_room = StorageRoom(folder, RequestLimits.of(self._server).max_stored_bytes)
        self._versions = versions = SharedVersions(
            SharedModel(self._start, client, costs), self._slots, self._metrics, self._operate
        )
        self._reloads = Reloads[SharedModel](versions, self._metrics.reloads, self._server.drain_timeout, self._prepare)
        self._tls = check_tls(self._server)
        if (tls := self._tls) is not None:
            self._metrics.certificate_end = lambda: tls.certificate.not_after
        with off_the_loop(versions.versions):
            await self._run(ready)

    async def _run(self, ready: Callable[[], None]) -> None:
        versions, tls = self._versions, self._tls
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
            if versions.model.client.state.status != "ended":
                await self._drain(keeping, hurry)
            else:  # their streams end with an error, and then they do
                await asyncio.wait(keeping, timeout=CLOSE_SECONDS + MARGIN_SECONDS)
        finally:
            for task in waits:
                task.cancel()
            self.kill()
            failures = [result for result in await asyncio.gather(*keeping, return_exceptions=True) if result]
            await self._reloads.close()
            if self._tenants is not None:
                await self._tenants.close()
            failure = versions.model.client.failure
            await versions.versions.close()
        if failure:
            raise EngineError("the engine ended before the server was stopped; the log above says why")
        if failures:
            raise failures[0]

    async def _keep(self, slot: ProcessSlot) -> None:
        """Starts a process again whenever it ends before the server is stopped. Raises EngineError if that happens too
        often."""
        while True:
            slot.connect(lambda message: self._answer(slot, message))
            self._versions.join(slot)
            watching = asyncio.create_task(slot.watch())
            try:
                status = await slot.api.ended()
            finally:
                watching.cancel()
            counts, seconds = slot.ended()
            if self._tenants is not None:
                self._tenants.ended(slot.number)
            self._gone = add(self._gone[0], counts), self._gone[1] + seconds
            if self._stopping or self._versions.model.client.failure:
                return
            how = how_it_ended(status, killed_here=slot.hung)
            log.error("API process %d %s; it is started again", slot.number, how)
            await slot.start_again()

    async def _announce(self, ready: Callable[[], None]) -> None:
        for slot in self._slots:
            await slot.ready.wait()
        ready()

    async def _drain(self, keeping: Sequence[asyncio.Task[None]], hurry: asyncio.Event) -> None:
        """Lets the processes finish the requests in flight. Those that do not end in time are killed."""
        for sock in self._sockets:
            sock.close()  # the processes have their own: they refuse connections when they have ended
        self._versions.order("drain")
        hurried = asyncio.create_task(hurry.wait())
        ended = asyncio.gather(*keeping, return_exceptions=True)
        seconds = self._server.shutdown_delay + self._server.drain_timeout + CLOSE_SECONDS + MARGIN_SECONDS
        await asyncio.wait((ended, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if hurry.is_set():
            self._versions.order("hurry")
            await asyncio.wait((ended,), timeout=CLOSE_SECONDS + MARGIN_SECONDS)
        hurried.cancel()

    async def _hang_up(self) -> None:
        if self._tls is not None:
            self._versions.order("read_certificate")
            asyncio.get_running_loop().run_in_executor(None, self._tls.reload)
        self._versions.order("read_keys")
        try:
            log.info("SIGHUP: %s", await self._reloads.reload())
        except APIError as error:
            log.error("SIGHUP: %s", error)

    async def _prepare(self, model: SharedModel, beside: bool) -> Start[SharedModel] | None:
        reloader = self._reloader
        return None if reloader is None else await reloader.prepare(model, beside, self._versions.loader)

    async def _sleep_when_unused(self, seconds: float) -> None:
        used, steps = time.monotonic(), -1
        while True:
            client = self._versions.model.client
            if not client.idle or client.state.status != "ready" or client.stats().steps != steps:
                used, steps = time.monotonic(), client.stats().steps
            elif time.monotonic() - used >= seconds:
                with contextlib.suppress(APIError, EngineError), self._reloads.changing("going to sleep"):
                    await client.control(Sleep())  # unless a request has just come
                    name = self._versions.model.name
                    log.info("%s is asleep: its engine has ended, and the next request starts it", name)
            await asyncio.sleep(min(seconds, 1.0))

    # -- requests of API processes --------------------------------------------------------------------------------

    async def _answer(self, slot: ProcessSlot, message: str) -> str:
        """Returns the reply to a request of an API process. Raises ValueError or EngineError."""
        command, _, argument = message.partition(" ")
        match command:
            case "ready":
                slot.answers()
                self._refusing = False
                self._refuse()
            case "run_batches":
                self._versions.order("run_batches")
            case "metrics":
                await self._count()
                body, content_type = await asyncio.to_thread(self._metrics.scrape(argument))
                return f"{content_type}\n{body.decode()}"
            case "reserve" | "record" | "written" if self._tenants is not None:
                self._refuse()
                return await self._tenants.answer(command, argument)
            case "load":
                await self._count()
                return load_of(self._versions.versions.series[0].of_model).decode()
            case "reply":
                slot.reply(argument)
            case "reload":
                self._versions.order("read_keys")
                try:
                    reply = ReloadReply(await self._reloads.reload(drain_first=argument == "drain_first"))
                except APIError as error:
                    reply = ReloadReply(error.message, error.status, error.code)
                return msgspec.json.encode(reply).decode()
        return ""

    def _refuse(self) -> None:
        """Orders the processes to refuse requests while the audit log must be written and cannot be."""
        refusing = self._tenants is not None and self._tenants.refuses
        if refusing != self._refusing:
            self._refusing = refusing
            self._versions.order(f"refuse {int(refusing)}")

    async def _operate(self, hub: Hub, message: ControlMessage) -> ControlAnswer:
        """Executes an operator's message for an engine. Raises ValueError or EngineError."""
        if not isinstance(message, Sleep):
            return await hub.client.control(message)
        try:
            with self._reloads.changing("going to sleep"):
                return await hub.client.control(message)
        except APIError as error:
            raise EngineError(error.message) from error

    async def _count(self) -> None:
        """Brings the sums of all processes into the metrics."""
        async with self._scraping:
            await asyncio.gather(*(slot.look() for slot in self._slots))
            total = add(self._gone[0], {"server": {"dropped_lines": self._dropped_lines()}})
            for slot in self._slots:
                total = add(total, slot.counts)
            self._metrics.load({"requests": {}, "in_flight": 0, "storage": {}, **total["server"]})
            for series in self._versions.versions.series:
                name, queue = series.of_model.name, series.engines.queue
                if (found := total.get("models", {}).get(name)) is None:
                    continue
                series.of_model.load(found["model"])
                before, now = self._queues.get(name, {"refused": 0, "late": 0}), found["queue"]
                queue.refused += now["refused"] - before["refused"]
                queue.late += now["late"] - before["late"]
                self._queues[name] = now

    def _usage(self) -> tuple[int, float]:
        """The resident bytes and processor seconds of this process and the API processes."""
        own = usage_of_one(os.getpid()) or (0, 0.0)
        used = [own, *(slot.used for slot in self._slots)]
        return sum(resident for resident, _ in used), self._gone[1] + sum(seconds for _, seconds in used)
