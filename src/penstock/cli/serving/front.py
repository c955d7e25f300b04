"""Implements `penstock serve --engines`: a server without an engine, whose engines are elsewhere (docs/fleet.md)."""

import asyncio
import os
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cli.serving.preemption import watch_for_preemption
from penstock.cli.serving.report import log

if TYPE_CHECKING:
    from penstock.cluster.members import Addresses
    from penstock.config import Given, ServerConfig

FIRST_SECONDS = 600.0  # for the first engine to be ready


def serve_front(given: "Given", sock: socket.socket, grpc: tuple[str, int] | None) -> None:
    """Serves until SIGTERM or SIGINT. The tokenizer and the chat template are those of the engines."""
    import uvloop

    from penstock.cli.address import listen
    from penstock.cluster.members import find_addresses
    from penstock.config import resolve_front
    from penstock.messages import EngineError
    from penstock.observe.logs import configure_logging
    from penstock.prepare.checks import check_grpc, check_providers, check_tls

    server = resolve_front(given, "penstock")  # before anything else: errors of settings come first
    addresses = find_addresses(server.engines)
    check_tls(server)
    check_grpc(server)
    check_providers(server)
    tls = engines_tls(server.fleet_ca)
    listen(sock)
    dropped_lines = configure_logging(server.log_level, server.log_format)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    watch_for_preemption(server.preemption_notice)
    try:
        uvloop.run(_main(given, server, sock, grpc, addresses, tls, dropped_lines))
    except (EngineError, OSError) as error:
        sys.exit(f"penstock: {error}")


def engines_tls(authority: str) -> ssl.SSLContext | None:
    """Returns the TLS context for connections to engines; None without an authority. Raises ValueError for a file that
    cannot be used."""
    if not authority:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # SSLError is one
        raise ValueError(f"--fleet-ca {authority} cannot be used: {error.strerror or error}; name a PEM file") from None


async def _main(
    given: "Given",
    settings: "ServerConfig",
    sock: socket.socket,
    grpc: tuple[str, int] | None,
    addresses: "Addresses",
    tls: ssl.SSLContext | None,
    dropped_lines: Callable[[], int],
) -> None:
    from prometheus_client import CollectorRegistry

    from penstock.cli.address import url_of
    from penstock.cli.serving.answering import Answering
    from penstock.cluster.client import FleetClient
    from penstock.cluster.members import Members
    from penstock.cluster.route import ROUTES
    from penstock.config import resolve_front
    from penstock.engine.remote.connector import connect_engine
    from penstock.frontend import Serving
    from penstock.frontend.http.loading import answering_early
    from penstock.frontend.registry import ModelRegistry
    from penstock.messages import Describe, Description, EngineError
    from penstock.observe.fleet import FleetSeries
    from penstock.observe.metrics import Metrics
    from penstock.prepare.checks import check_tls
    from penstock.prepare.described import store
    from penstock.prepare.served import served_model

    began = time.monotonic()
    front = f"{socket.gethostname()}:{sock.getsockname()[1]}"
    fleet = FleetClient(
        ROUTES[settings.route],
        clock=time.monotonic,
        move_anywhere=settings.move_anywhere,
        hold_seconds=settings.hold_timeout,
    )
    members = Members(fleet, addresses, lambda address: connect_engine(address, settings.fleet_key, tls, front=front))
    fleet.keep(members.run())
    with tempfile.TemporaryDirectory(prefix="penstock-front-") as name:
        try:
            own_tls = check_tls(settings)
            async with answering_early(sock, None if own_tls is None else own_tls.context):
                try:
                    async with asyncio.timeout(FIRST_SECONDS):
                        await fleet.ready()
                except TimeoutError:
                    why = "; ".join(filter(None, members.troubles.values())) or "none was found"
                    raise EngineError(f"no engine was ready within {FIRST_SECONDS:g} s: {why}") from None
                description = await fleet.replicas[0].engine.control(Describe())
            assert isinstance(description, Description)
            server = resolve_front(given, description.model)
            answers = await asyncio.to_thread(store, description, name, server)
            served = await asyncio.to_thread(served_model, answers, fleet)
            metrics = Metrics(CollectorRegistry(), dropped_lines, vllm_names=server.vllm_metrics)
            FleetSeries(metrics.registry, fleet)
            registry = ModelRegistry(Serving(served, metrics, server.drain_timeout))
            answering = Answering(registry, server, metrics, grpc)

            def ready() -> None:
                url, engines = url_of(sock, tls=own_tls is not None), len(fleet.replicas)
                text = "serving %s on %s with %d engines so far, ready after %.1f s"
                log.info(text, served.name, url, engines, time.monotonic() - began)

            await answering.run(sock, ready)
        finally:
            await fleet.close()
