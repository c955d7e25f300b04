"""Runs several API processes over one engine, which it starts again when they end. It speaks no HTTP itself.

Each process has a listening socket of its own on the one port, among which the kernel divides the connections. The
supervisor holds these sockets, too, so that connections to a process that ends wait for the one that replaces it.
"""

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.cli.address import grpc_address, listen
from penstock.cli.operate.reload import Reloader
from penstock.cli.serving.api_process import ApiStart, ReloadReply
from penstock.cli.serving.process_counts import ProcessCounts
from penstock.cli.serving.process_slot import ProcessSlot
from penstock.cli.serving.processors import off_the_loop
from penstock.cli.serving.shared_versions import SharedModel, SharedVersions
from penstock.config import ConfigError, ServerConfig
from penstock.engine.child import how_it_ended
from penstock.engine.client import StreamingClient
from penstock.engine.shared.hub import Hub
from penstock.frontend.errors import APIError
from penstock.frontend.http.server import CLOSE_SECONDS, handle_signals
from penstock.frontend.limits import RequestLimits
from penstock.frontend.pages.server import load_of
from penstock.frontend.providers.gateway import open_gateway
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.requests.context_policy import Summaries, check_summariser
from penstock.frontend.storage.database import lock_folder, storage_folder
from penstock.frontend.storage.room import StorageRoom
from penstock.frontend.tenants.books import LocalBooks
from penstock.frontend.versions.reloads import Reloads, Start
from penstock.messages import ControlAnswer, ControlMessage, EngineError, Sleep
from penstock.observe.costs import CostModel
from penstock.observe.metrics import Metrics
from penstock.prepare.checks import check_tls
from penstock.prepare.model import PreparedModel
from penstock.prepare.served import text_digest

if TYPE_CHECKING:
    from penstock.cli.serving.repository import ServedRepository
    from penstock.cli.serving.shared.owner import RepositoryOwner

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
        self._start, self._server = start, start.server
        self._sockets = sockets
        self._slots = [
            ProcessSlot(msgspec.structs.replace(start, number=number), listening, lock)
            for number, listening in enumerate(sockets)
        ]
        self._owner: RepositoryOwner | None = None  # of the repository, if there is one
        self._stopping, self._summaries = False, Summaries()
        self._tenants = LocalBooks(self._server) if self._server.tenants else None
        self._refusing = False  # what the processes know of `_refuse`

    def kill(self) -> None:
        """Ends all processes at once."""
        for slot in self._slots:
            slot.api.process.kill()

    async def run(
        self,
        engine: tuple[StreamingClient, CostModel | None, Reloader] | None,
        dropped_lines: Callable[[], int],
        ready: Callable[[], None],
        repository: "Callable[[Metrics], ServedRepository] | None" = None,
    ) -> None:
        """Lets the processes answer until a signal, as `penstock.frontend.serve` does, and closes the `engine` of the
        model on the command line, which comes with the costs of its steps; None: there is no such model. `ready`
        is called when all processes answer. `repository` returns the repository, if the server has one. Raises
        EngineError if the engine or a process ends for good."""
        self._counts = ProcessCounts(self._slots, dropped_lines, vllm_names=self._server.vllm_metrics)
        metrics, server = self._counts.metrics, self._server
        if (folder := storage_folder(server)) is not None:
            metrics.storage_room = StorageRoom(folder, RequestLimits.of(server).max_stored_bytes)
        self._tls = check_tls(server)
        if (tls := self._tls) is not None:
            metrics.certificate_end = lambda: tls.certificate.not_after
        self._versions: SharedVersions | None = None
        self._reloads: Reloads[SharedModel] | None = None
        with contextlib.ExitStack() as kept:
            if engine is not None:
                client, costs, self._reloader = engine
                model = SharedModel(self._start, client, costs)
                self._versions = versions = SharedVersions(model, self._slots, metrics, self._operate)
                self._reloads = Reloads(versions, metrics.reloads, server.drain_timeout, self._prepare)
                kept.enter_context(off_the_loop(versions.versions))
            if repository is not None:
                from penstock.cli.serving.shared.owner import RepositoryOwner  # imports NumPy

                self._owner = RepositoryOwner(repository(metrics))
            names, models = [] if engine is None else [server.served_model_name, *server.aliases], ModelRegistry()
            if self._owner is not None:
                names += self._owner.repository.folder.names()
            if server.providers:  # checks the file, and has the metrics of all processes
                open_gateway(server.providers, models, metrics, others=names)
            check_summariser(server.context_policy, [*names, *models.names()])
            await self._run(ready)

    @property
    def _failure(self) -> str:
        """Why the engine has ended for good; "" if it has not, or there is none."""
        return "" if self._versions is None else self._versions.model.client.failure

    async def _run(self, ready: Callable[[], None]) -> None:
        versions, tls = self._versions, self._tls
        stopping, hurry = handle_signals(self._hang_up)
        keeping = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        waits = [asyncio.create_task(stopping.wait()), asyncio.create_task(self._announce(ready))]
        if self._server.sleep_after is not None and versions is not None:
            waits.append(asyncio.create_task(self._sleep_when_unused(versions, self._server.sleep_after)))
        if self._owner is not None:
            waits.append(asyncio.create_task(self._owner.start()))
        if tls is not None:
            waits.append(asyncio.create_task(tls.watch()))
        try:
            await asyncio.wait((waits[0], *keeping), return_when=asyncio.FIRST_COMPLETED)
            self._stopping = True
            if versions is None or versions.model.client.state.status != "ended":
                await self._drain(keeping, hurry)
            else:  # their streams end with an error, and then they do
                await asyncio.wait(keeping, timeout=CLOSE_SECONDS + MARGIN_SECONDS)
        finally:
            for task in waits:
                task.cancel()
            self.kill()
            failures = [result for result in await asyncio.gather(*keeping, return_exceptions=True) if result]
            if self._tenants is not None:
                await self._tenants.close()
            failure = self._failure
            if self._owner is not None:
                await self._owner.close()
            if versions is not None and self._reloads is not None:
                await self._reloads.close()
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
            if self._versions is not None:
                self._versions.join(slot)
            if self._owner is not None:
                self._owner.join(slot)
            watching = asyncio.create_task(slot.watch())
            try:
                status = await slot.api.ended()
                await slot.read_rest()
            finally:
                watching.cancel()
            if self._owner is not None:
                self._owner.leave(slot)
            self._counts.ended(slot.number, *slot.ended())
            if self._tenants is not None:
                self._tenants.ended(slot.number)
            if self._stopping or self._failure:
                return
            how = how_it_ended(status, killed_here=slot.hung)
            log.error("API process %d %s; it is started again", slot.number, how)
            await slot.start_again()

    async def _announce(self, ready: Callable[[], None]) -> None:
        for slot in self._slots:
            await slot.ready.wait()
        self._order("all_answer")
        gc.freeze()
        gc.enable()
        ready()

    async def _drain(self, keeping: Sequence[asyncio.Task[None]], hurry: asyncio.Event) -> None:
        """Lets the processes finish the requests in flight. Those that do not end in time are killed."""
        for sock in self._sockets:
            sock.close()  # the processes have their own: they refuse connections when they have ended
        self._order("drain")
        hurried = asyncio.create_task(hurry.wait())
        ended = asyncio.gather(*keeping, return_exceptions=True)
        seconds = self._server.shutdown_delay + self._server.drain_timeout + CLOSE_SECONDS + MARGIN_SECONDS
        await asyncio.wait((ended, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if hurry.is_set():
            self._order("hurry")
            await asyncio.wait((ended,), timeout=CLOSE_SECONDS + MARGIN_SECONDS)
        hurried.cancel()

    async def _hang_up(self) -> None:
        if self._tls is not None:
            self._order("read_certificate")
            asyncio.get_running_loop().run_in_executor(None, self._tls.reload)
        try:
            log.info("SIGHUP: %s", await self._reload())
        except APIError as error:
            log.error("SIGHUP: %s", error)

    async def _reload(self, *, drain_first: bool = False) -> str:
        """Lets all processes read their keys again, and reloads the model. Raises APIError."""
        self._order("read_keys")
        if self._reloads is None:
            return "keys were read again; the server has no model of its own to reload"
        return await self._reloads.reload(drain_first=drain_first)

    async def _prepare(self, model: SharedModel, beside: bool) -> Start[SharedModel] | None:
        assert self._versions is not None
        return await self._reloader.prepare(model, beside, self._versions.loader)

    async def _sleep_when_unused(self, versions: SharedVersions, seconds: float) -> None:
        used, steps = time.monotonic(), -1
        while True:
            client = versions.model.client
            if not client.idle or client.state.status != "ready" or client.stats().steps != steps:
                used, steps = time.monotonic(), client.stats().steps
            elif time.monotonic() - used >= seconds:
                with contextlib.suppress(APIError, EngineError):
                    await self._sleep(client)  # unless a request has just come
                    log.info("%s is asleep: its engine has ended, and the next request starts it", versions.model.name)
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
                self._order("run_batches")
            case "summary":
                return await self._summaries.answer(argument)
            case "metrics":
                await self._counts.look()
                body, content_type = await asyncio.to_thread(self._counts.metrics.scrape(argument))
                return f"{content_type}\n{body.decode()}"
            case "reserve" | "record" | "written" if self._tenants is not None:
                self._refuse()
                return await self._tenants.answer(command, argument)
            case "load":
                await self._counts.look()
                if (found := self._counts.metrics.models.get(argument)) is None:
                    raise EngineError(f"model {argument!r} was unloaded")
                return load_of(found).decode()
            case "reply":
                slot.reply(argument)
            case "reload":
                try:
                    reply = ReloadReply(await self._reload(drain_first=argument == "drain_first"))
                except APIError as error:
                    reply = ReloadReply(error.message, error.status, error.code)
                return msgspec.json.encode(reply).decode()
        return ""

    def _refuse(self) -> None:
        """Orders the processes to refuse requests while the audit log must be written and cannot be."""
        refusing = self._tenants is not None and self._tenants.refuses
        if refusing != self._refusing:
            self._refusing = refusing
            self._order(f"refuse {int(refusing)}")

    def _order(self, name: str) -> None:
        """Sends all processes an order."""
        for slot in self._slots:
            slot.order(name)

    async def _operate(self, hub: Hub, message: ControlMessage) -> ControlAnswer:
        """Executes an operator's message for an engine. Raises ValueError or EngineError."""
        if not isinstance(message, Sleep):
            return await hub.client.control(message)
        try:
            return await self._sleep(hub.client)
        except APIError as error:
            raise EngineError(error.message) from error

    async def _sleep(self, client: StreamingClient) -> ControlAnswer:
        """Ends the engine until the next request. Raises EngineError, and APIError 409 during a reload."""
        assert self._reloads is not None
        with self._reloads.changing("going to sleep"):
            return await client.control(Sleep())


def start_supervisor(
    server: ServerConfig,
    sock: socket.socket,
    grpc_sock: socket.socket | None,
    prepared: PreparedModel | None = None,
) -> Supervisor:
    """Starts the API processes. Raises OSError, and ConfigError if another server uses the storage."""
    sockets = shared_port(sock, server.api_processes)
    for one in sockets:
        listen(one)
    grpc = None
    if grpc_sock is not None:  # which keeps the port: each process listens there with a socket of its own
        grpc_sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        grpc = grpc_address(grpc_sock)
    folder = storage_folder(server)
    try:
        lock = -1 if folder is None else lock_folder(folder)
    except APIError as error:
        raise ConfigError(error.message) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        message = f"--state-dir is {str(folder)!r}: it cannot be used: {reason}; name another folder, or none"
        raise ConfigError(message) from error
    start = ApiStart(server=server, created=int(time.time()), grpc=grpc)
    if prepared is not None:
        answers = prepared.answers
        start = msgspec.structs.replace(start, answers=answers, texts=text_digest(answers))
    return Supervisor(start, sockets, lock)
