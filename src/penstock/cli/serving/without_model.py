"""Implements `penstock serve` without a model: a repository, the models of providers, or both."""

import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.cli.options import Flags
from penstock.cli.serving.preemption import watch_for_preemption
from penstock.cli.serving.report import log

if TYPE_CHECKING:
    from penstock.cli.serving.repository import ServedRepository
    from penstock.config import Given, ServerConfig
    from penstock.observe.metrics import Metrics


def serve_without_model(given: "Given", flags: Flags, began: float) -> None:
    """Serves a repository, the models of providers, or both."""
    import uvloop

    from penstock.cli.address import bind, grpc_address, listen, url_of
    from penstock.config import resolve_server
    from penstock.messages import EngineError
    from penstock.observe.logs import configure_logging
    from penstock.observe.stderr import complain
    from penstock.prepare.checks import check_grpc, check_providers, check_tls

    server = resolve_server(given)
    check_providers(server)
    sock = bind(server.host, server.port)
    grpc_sock = None if server.grpc_port is None else bind(server.host, server.grpc_port, "--grpc-port")
    check_grpc(server)
    check_tls(server)
    supervisor = None
    if server.api_processes > 1:
        from penstock.cli.serving.supervisor import start_supervisor

        supervisor = start_supervisor(server, sock, grpc_sock)
    else:
        listen(sock)
    dropped_lines = configure_logging(server.log_level, server.log_format)
    watch_for_preemption(server.preemption_notice)
    url, grpc = url_of(sock, tls=bool(server.tls_certificate)), None if grpc_sock is None else grpc_address(grpc_sock)

    def ready() -> None:
        what = server.repository or server.providers
        log.info("serving %s on %s, ready after %.1f s", what, url, time.monotonic() - began)
        if grpc is not None:
            log.info("KServe's gRPC service is on %s:%d", *grpc)

    repository = partial(_repository, server, flags) if server.repository else None
    try:
        if supervisor is None:
            uvloop.run(_main_without_model(server, repository, sock, grpc_sock, dropped_lines, ready))
        else:
            uvloop.run(supervisor.run(None, dropped_lines, ready, repository))
    except (EngineError, OSError) as error:
        complain(f"penstock: {error}")
        sys.exit(1)
    finally:
        if supervisor is not None:
            supervisor.kill()


async def _main_without_model(
    server: "ServerConfig",
    make_repository: "Callable[[Metrics], ServedRepository] | None",
    sock: socket.socket,
    grpc_sock: socket.socket | None,
    dropped_lines: Callable[[], int],
    ready: Callable[[], None],
) -> None:
    from prometheus_client import CollectorRegistry

    from penstock.cli.address import freed
    from penstock.cli.serving.answering import Answering
    from penstock.frontend import ModelRegistry
    from penstock.frontend.http.loading import answering_early
    from penstock.observe.metrics import Metrics
    from penstock.prepare.checks import check_tls

    metrics = Metrics(CollectorRegistry(), dropped_lines, vllm_names=server.vllm_metrics)
    tls = check_tls(server)
    repository = None if make_repository is None else make_repository(metrics)
    registry = ModelRegistry() if repository is None else repository.registry
    grpc = freed(grpc_sock)

    try:
        if repository is not None:
            async with answering_early(sock, None if tls is None else tls.context):
                await repository.start()
        await Answering(registry, server, metrics, grpc).run(sock, ready)
    finally:
        if repository is not None:
            await repository.close()


def _repository(server: "ServerConfig", flags: Flags, metrics: "Metrics") -> "ServedRepository":
    from penstock.cli.serving.repository import ServedRepository
    from penstock.cli.serving.shares import EngineShares

    shares = EngineShares(server.repository, server.max_loaded, cache_bytes=server.repository_cache)
    return ServedRepository(server, flags, metrics, None, shares)
