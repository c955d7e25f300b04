"""Implements `penstock serve`: the engine in a process of its own, and the HTTP server in this one or in several."""

import contextlib
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from penstock.cli.options import Flags
from penstock.cli.serving.preemption import watch_for_preemption
from penstock.cli.serving.report import log, log_start, show_end, show_memory
from penstock.engine.link.engine_child import EngineChild

if TYPE_CHECKING:
    from penstock.cli.serving.repository import ServedRepository
    from penstock.cli.serving.shares import EngineShares
    from penstock.cli.serving.supervisor import Supervisor
    from penstock.cluster.client import FleetClient
    from penstock.config import Given
    from penstock.engine.client import StreamingClient
    from penstock.frontend.versions.serving import Serving
    from penstock.observe.metrics import Metrics
    from penstock.prepare.model import PreparedModel

OPEN_FILES = 65536  # that the server may have, if the hard limit allows it


def serve(model: str | None, flags: Flags, engine: EngineChild | None = None) -> None:
    """Serves until SIGTERM or SIGINT (Ctrl-C). `engine` is the engine process if the caller has already started one.

    The port is bound first: if it is in use, that is the only error shown, and nothing has been loaded. The engine gets
    its configuration before this process imports the server, so that both work at the same time. That is why most
    imports are inside the functions.
    """
    began = time.monotonic()
    _allow_open_files()
    gc.disable()  # until the server is ready: imports create many objects and hardly any garbage
    with contextlib.ExitStack() as held:
        if engine is not None:
            held.enter_context(engine)
        from penstock.cli.address import bind, freed, listen
        from penstock.config import ServerConfig
        from penstock.messages import EngineError
        from penstock.observe.logs import configure_logging
        from penstock.prepare.model import read_given
        from penstock.prepare.promises import promise

        given, default = read_given(model, flags), ServerConfig()
        elsewhere = bool(given.settings.engines)
        if (given.settings.repository or given.settings.providers) and given.settings.model is None and not elsewhere:
            held.close()  # the engines of its language models start with their own settings
            from penstock.cli.serving.without_model import serve_without_model

            serve_without_model(given, flags, began)
            return
        if elsewhere or given.settings.replicas not in (None, "1"):
            held.close()
            engine = None
        elif engine is None:
            engine = held.enter_context(_engine())
        port = default.port if given.settings.port is None else given.settings.port
        sock = bind(host := given.settings.host or default.host, port)
        grpc_sock = None if given.settings.grpc_port is None else bind(host, given.settings.grpc_port, "--grpc-port")
        if elsewhere:
            from penstock.cli.serving.front import serve_front

            serve_front(given, sock, freed(grpc_sock))
            return
        prepared, shares = _prepared(given)
        if engine is not None:
            engine.send_config(prepared.resolved.engine)
        start = _ServerStart(model, flags, given, prepared, engine, sock, grpc_sock, began, shares)
        supervisor, server = _supervisor(start), prepared.resolved.server
        if supervisor is None:
            listen(sock)

        import uvloop

        dropped_lines = configure_logging(server.log_level, server.log_format)
        if prepared.hardware.device == "cpu":
            rows = [row for plan in prepared.resolved.ranks for row in plan.rows[:-1]]  # the last one is free
            promise(sum(row.bytes for row in rows))
        show_memory(prepared.resolved)
        watch_for_preemption(server.preemption_notice)
        try:
            if supervisor is None:
                uvloop.run(_main(start, dropped_lines))
            else:
                uvloop.run(_supervise(start, supervisor, dropped_lines))
        except (EngineError, OSError) as error:
            show_end(prepared.resolved, error)
            sys.exit(1)
        finally:  # a late signal must not turn a clean end into a kill
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            if supervisor is not None:
                supervisor.kill()


def _engine() -> EngineChild:
    try:
        return EngineChild()
    except OSError as error:
        sys.exit(f"penstock: cannot start the engine process: {error}")


def _prepared(given: "Given") -> tuple["PreparedModel", "EngineShares | None"]:
    """Resolves the settings of the model. An engine with others beside it, replicas or language models of a repository,
    gets a part of the machine. The shares of the latter are returned, too."""
    from penstock.prepare.device import detect_device
    from penstock.prepare.model import find_given, prepare_found

    settings, hardware = given.settings, None
    if settings.replicas not in (None, "1"):
        from penstock.cli.serving.replicas import share_of
        from penstock.config.sizes import replica_limits

        hardware = share_of(detect_device(settings.device), replica_limits(settings.replicas)[1])
    elif settings.repository:
        from penstock.cli.serving.shares import EngineShares

        cache = settings.repository_cache
        shares = EngineShares(settings.repository, settings.max_loaded, beside=True, cache_bytes=cache)
        return shares.enter(shares.prepare(find_given(given), detect_device(settings.device))), shares
    return prepare_found(find_given(given), hardware), None


def _allow_open_files() -> None:
    """Raises the soft limit of open files, often 1024, up to the hard limit: each connection needs one, and
    --max-in-flight alone is 2048."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _ServerStart(NamedTuple):
    """The command line of the server, what was read from it, and what the start has made so far."""

    model: str | None  # as on the command line
    flags: Flags
    given: "Given"
    prepared: "PreparedModel"
    engine: EngineChild | None  # None: --replicas starts its own
    sock: socket.socket
    grpc_sock: socket.socket | None
    began: float  # on time.monotonic()
    shares: "EngineShares | None"  # with the engines of a repository; None: it has none

    async def connect(self) -> "StreamingClient | FleetClient":
        """Returns the client of the engine, or of all replicas, when it is ready."""
        from penstock.engine.link.ipc import connect
        from penstock.observe.reporting import reporting
        from penstock.prepare.engine import verified
        from penstock.weights.manifest import ManifestCheck

        config, plain = self.prepared.resolved.engine, self.prepared.resolved.server.log_format == "text"
        check = ManifestCheck(self.prepared.path)
        if self.prepared.resolved.server.replicas != "1":
            from penstock.cli.serving.replicas import start_replicas

            with reporting("starting the engines") if plain else contextlib.nullcontext():
                return await verified(start_replicas(self.prepared), check)
        assert self.engine is not None
        with reporting("starting the engine") if plain else contextlib.nullcontext():  # torch takes seconds to import
            return await verified(connect(config, self.engine, resumes=True), check)


def _supervisor(start: _ServerStart) -> "Supervisor | None":
    """Starts the API processes if there are several. Raises OSError and ConfigError."""
    server = start.prepared.resolved.server
    if server.api_processes == 1:
        return None
    from penstock.cli.serving.supervisor import start_supervisor

    return start_supervisor(server, start.sock, start.grpc_sock, start.prepared)


async def _main(start: _ServerStart, dropped_lines: Callable[[], int]) -> None:
    import asyncio
    import os

    prepared = start.prepared
    connecting = asyncio.create_task(start.connect())
    await asyncio.sleep(0)  # starts the connection before the imports below block this loop
    try:
        from prometheus_client import CollectorRegistry

        from penstock.cli.address import freed
        from penstock.cli.machine import cost_model
        from penstock.cli.operate.reload import LoadedVersion, Reloader, load_here
        from penstock.cli.serving.answering import Answering
        from penstock.frontend import ModelRegistry, Serving
        from penstock.frontend.http.loading import answering_early
        from penstock.observe.metrics import Metrics
        from penstock.prepare.checks import check_tls
        from penstock.prepare.served import served_model
        from penstock.text import Tokenizer

        # Texts are tokenised one at a time, so the library needs no thread pool. Its threads would take processor time
        # from the kernels.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = Tokenizer.load(prepared.path)
        loaded = LoadedVersion.of(prepared, start.given)
        reloader = Reloader(start.model, start.flags, loaded, os.sched_getaffinity(0), start.shares)
    except BaseException:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        raise
    tls = check_tls(prepared.resolved.server)
    async with answering_early(start.sock, None if tls is None else tls.context):
        client = await connecting
    costs = cost_model(prepared, prepared.hardware)
    served = served_model(prepared.answers, client, tokenizer, costs, loaded.texts)
    server = prepared.resolved.server
    metrics = Metrics(CollectorRegistry(), dropped_lines, vllm_names=server.vllm_metrics)
    grpc = freed(start.grpc_sock)
    if server.replicas != "1":
        from penstock.cli.serving.replicas import add_series

        add_series(metrics, client)
    serving = Serving(
        served, metrics, server.drain_timeout, lambda model, beside: reloader.prepare(model, beside, load_here)
    )
    repository = None
    if start.shares is not None:
        from penstock.cli.serving.repository import ServedRepository

        start.shares.started(prepared, cast("StreamingClient", client))
        repository = ServedRepository(server, start.flags, metrics, serving, start.shares)
    registry = ModelRegistry(serving) if repository is None else repository.registry
    answering = Answering(registry, server, metrics, grpc)

    def ready() -> None:
        if served.thinking_budget is not None and served.chat_format.reasoning is None:
            log.warning("--thinking-budget has no effect: this model has no known form of reasoning")
        log_start(prepared, client.info, start.sock, grpc, answering.tls, start.began)

    # Several engines end one by one, see `start_replicas`.
    sleeping = asyncio.create_task(_sleep_when_unused(serving, server.sleep_after if server.replicas == "1" else None))
    try:
        if repository is not None:
            async with answering_early(start.sock, None if tls is None else tls.context):
                await repository.start()
        await answering.run(start.sock, ready)
    finally:
        sleeping.cancel()
        if repository is not None:
            await repository.close()


async def _supervise(start: _ServerStart, supervisor: "Supervisor", dropped_lines: Callable[[], int]) -> None:
    import os

    from penstock.cli.address import grpc_address
    from penstock.cli.machine import cost_model
    from penstock.cli.operate.reload import LoadedVersion, Reloader
    from penstock.prepare.checks import check_tls

    prepared, server = start.prepared, start.prepared.resolved.server
    client = cast("StreamingClient", await start.connect())  # --replicas does not go with several API processes
    loaded = LoadedVersion.of(prepared, start.given)
    reloader = Reloader(start.model, start.flags, loaded, os.sched_getaffinity(0), start.shares)

    def repository(metrics: "Metrics") -> "ServedRepository":
        from penstock.cli.serving.repository import ServedRepository

        assert start.shares is not None
        start.shares.started(prepared, client)
        taken = (server.served_model_name, *server.aliases)
        return ServedRepository(server, start.flags, metrics, None, start.shares, taken)

    def ready() -> None:
        grpc = None if start.grpc_sock is None else grpc_address(start.grpc_sock)
        log_start(prepared, client.info, start.sock, grpc, check_tls(server), start.began)

    costs = cost_model(prepared, prepared.hardware)
    named = repository if start.shares is not None else None
    await supervisor.run((client, costs, reloader), dropped_lines, ready, named)


async def _sleep_when_unused(serving: "Serving", seconds: float | None) -> None:
    if seconds is not None:
        serving.keep_alive = seconds
        await serving.sleep_when_unused()
