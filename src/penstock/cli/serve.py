"""Implements `penstock serve`: an HTTP server in this process, and the engine in a process of its own."""

import gc
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.cli.options import Flags
from penstock.engine.link.engine_child import EngineChild
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.cli.prepare import PreparedModel
    from penstock.config import Given, Resolved
    from penstock.frontend.http.access import Access
    from penstock.frontend.http.tls import TLS
    from penstock.frontend.kserve.grpc import GRPCServer
    from penstock.frontend.serving import Serving
    from penstock.messages import EngineInfo


def serve(model: str | None, flags: Flags, engine: EngineChild | None = None) -> None:
    """Serves until SIGTERM or SIGINT (Ctrl-C). `engine` is the engine process if the caller has already started one.

    The port is bound first: if it is in use, that is the only error shown, and nothing has been loaded. The engine gets
    its configuration before this process imports the server, so that both work at the same time. That is why most
    imports are inside the functions.
    """
    started = time.monotonic()
    gc.disable()  # until the server is ready: imports create many objects and hardly any garbage
    try:
        engine = engine or EngineChild()
    except OSError as error:
        sys.exit(f"penstock: cannot start the engine process: {error}")
    with engine as spawned:
        from penstock.cli.address import bind, listen
        from penstock.cli.prepare import find_given, prepare_found, read_given
        from penstock.config import ServerConfig
        from penstock.messages import EngineError
        from penstock.observe.logs import configure_logging

        given, default = read_given(model, flags), ServerConfig()
        port = default.port if given.settings.port is None else given.settings.port
        host = given.settings.host or default.host
        sock = bind(host, port)
        grpc_sock = None if given.settings.grpc_port is None else bind(host, given.settings.grpc_port, "--grpc-port")
        prepared = prepare_found(find_given(given))
        spawned.send_config(prepared.resolved.engine)
        listen(sock)

        import uvloop

        dropped_lines = configure_logging(style=prepared.resolved.server.log_format)
        _show_memory(prepared.resolved)
        try:
            uvloop.run(_main(_Start(model, flags, given, prepared), spawned, sock, grpc_sock, started, dropped_lines))
        except (EngineError, OSError) as error:
            _show_end(prepared.resolved, error)
            sys.exit(1)
        finally:  # a late signal must not turn a clean end into a kill
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)


class _Start(NamedTuple):
    """The command line of the server, and what was read from it."""

    model: str | None  # as on the command line
    flags: Flags
    given: "Given"
    prepared: "PreparedModel"


async def _main(
    start: _Start,
    spawned: EngineChild,
    sock: socket.socket,
    grpc_sock: socket.socket | None,
    started: float,
    dropped_lines: Callable[[], int],
) -> None:
    import asyncio
    import contextlib
    import logging
    import os

    from penstock.cli.engine import verified
    from penstock.engine.link.ipc import connect
    from penstock.engine.processors import keep_off
    from penstock.weights.manifest import ManifestCheck

    prepared, server = start.prepared, start.prepared.resolved.server
    check = ManifestCheck(prepared.path)
    connecting = asyncio.create_task(verified(connect(prepared.resolved.engine, spawned, resumes=True), check))
    await asyncio.sleep(0)  # starts the connection before the imports below block this loop
    try:
        from prometheus_client import CollectorRegistry

        from penstock.cli.address import url_of
        from penstock.cli.checks import check_tls
        from penstock.cli.machine import cost_model
        from penstock.cli.operate.reload import Loaded, Reloader
        from penstock.cli.prepare import served_model
        from penstock.frontend import create_app
        from penstock.frontend import serve as serve_http
        from penstock.observe.metrics import Metrics
        from penstock.observe.reporting import reporting
        from penstock.observe.tracing import Tracer
        from penstock.text import Tokenizer

        # Texts are tokenised one at a time, so the library needs no thread pool. Its threads would take processor time
        # from the kernels.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = Tokenizer.load(prepared.path)
        loaded = Loaded.of(prepared, start.given)
        reloader = Reloader(start.model, start.flags, loaded, os.sched_getaffinity(0))
    except BaseException:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        raise
    plain = server.log_format == "text"
    with reporting("starting the engine") if plain else contextlib.nullcontext():  # torch alone takes seconds to import
        client = await connecting
    served = served_model(prepared, client, tokenizer, cost_model(prepared, prepared.hardware), loaded.texts)
    metrics = Metrics(CollectorRegistry(), dropped_lines)
    tracer = Tracer(server.otlp_endpoint, served.name, __version__) if server.otlp_endpoint else None
    store = None
    if server.manage_models:
        from penstock.cli.models.store import LocalStore

        store = LocalStore(prepared.path)
    app = create_app(served, server, metrics, tracer=tracer, store=store, prepare=reloader.prepare)
    tls = check_tls(server)
    if tls is not None:
        metrics.certificate_end = lambda: tls.certificate.not_after

    grpc_server = None if grpc_sock is None else _grpc_server(app, grpc_sock, tls)

    def ready() -> None:
        gc.freeze()  # what exists now lives as long as the server: later collections need not scan it
        gc.enable()
        seconds = time.monotonic() - started
        log = logging.getLogger("penstock.serve")
        for line in start_report(prepared.resolved, client.info):
            log.info(line)
        if prepared.generation:
            values = ", ".join(f"{name} {value:g}" for name, value in prepared.generation.items())
            log.info(
                "sampling of requests that do not set it: %s (from the model; --generation-config none turns it off)",
                values,
            )
        if served.thinking_budget is not None and served.conversation.reasoning is None:
            log.warning("--thinking-budget has no effect: this model has no known form of reasoning")
        if tls is not None:
            log.info("TLS certificate: %s", tls.certificate)
        log.info("serving %s on %s, ready after %.1f s", served.name, url_of(sock, tls=tls is not None), seconds)
        if grpc_server is not None:
            log.info("KServe's gRPC service is on %s", grpc_server.address)
        log.info("open it in a browser to try it; OpenAI's API is at /v1, metrics at /metrics; Ctrl-C stops the server")

    # A worker thread holds the interpreter for this long while the event loop waits; the default is 5 ms.
    sys.setswitchinterval(0.0005)
    with keep_off(client.info.cpu):  # the processor that the engine's loop stays on
        sleeping = asyncio.create_task(_sleep_when_unused(app.serving, server.sleep_after))
        try:
            await serve_http(app, sock, tls=tls, ready=ready, beside=grpc_server)
        finally:
            sleeping.cancel()
            if tracer is not None:
                tracer.close()


async def _sleep_when_unused(serving: "Serving", seconds: float | None) -> None:
    if seconds is not None:
        await serving.sleep_when_unused(seconds)


def _grpc_server(app: "Access", sock: socket.socket, tls: "TLS | None") -> "GRPCServer":
    """Returns the gRPC server for an address. gRPC makes its own socket, so that of `bind`, which kept the port until
    now, is closed."""
    from penstock.frontend.kserve.grpc import GRPCServer

    host, port = sock.getsockname()[:2]
    sock.close()
    return GRPCServer(app, f"[{host}]" if sock.family == socket.AF_INET6 else host, port, tls)


def _show_memory(resolved: "Resolved") -> None:
    """Shows the memory table, or logs its rows as one object."""
    if resolved.server.log_format == "text":
        from rich.console import Console

        from penstock.cli.prepare import memory_table

        Console(stderr=True).print(memory_table(resolved, f"Memory for {resolved.engine.name}"))
    else:
        import logging

        sizes = {row.name: row.bytes for row in resolved.memory.rows}
        fields = {"model": resolved.engine.name, "bytes": sizes}
        logging.getLogger("penstock.serve").info("memory", extra={"fields": fields})


def _show_end(resolved: "Resolved", error: Exception) -> None:
    """Shows why the server ended, in one line."""
    if resolved.server.log_format == "text":
        from penstock.observe.stderr import complain

        complain(f"penstock: {error}")
    else:
        import logging

        logging.getLogger("penstock.serve").error("%s", error)


def start_report(resolved: "Resolved", info: "EngineInfo") -> list[str]:
    """Returns lines about what was started and what it can hold."""
    key = "clients must send the API key" if resolved.server.api_key else "no API key is required"
    tokens = (min(info.num_blocks) - 1) * info.block_size  # block 0 is the null page
    return [
        f"penstock {__version__}: {resolved.engine.name}, computed in {info.dtype}; {key}",
        f"KV cache: {tokens:,} tokens in {resolved.engine.kv_dtype}; at most {info.max_model_len:,} "
        f"in a request, {info.max_num_seqs} sequences at a time",
    ]
