"""Answers requests in this process, with an engine that is ready."""

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Callable

from penstock.cli.serving.processors import off_the_loop
from penstock.config import ConfigError, ServerConfig
from penstock.frontend import ModelRegistry, RequestLimits, create_app
from penstock.frontend import serve as serve_http
from penstock.frontend.requests.context_policy import check_summariser
from penstock.frontend.siblings import Siblings
from penstock.observe.metrics import Metrics
from penstock.observe.tracing import Tracer
from penstock.prepare.checks import check_tls
from penstock.version import __version__

SWITCH_SECONDS = 0.0005  # that a worker thread holds the interpreter while the event loop waits; the default is 5 ms


class Answering:
    """The app of an API process, with its certificate, traces and gRPC server."""

    def __init__(
        self,
        models: ModelRegistry,
        server: ServerConfig,
        metrics: Metrics,
        grpc: tuple[str, int] | None,
        siblings: Siblings | None = None,
    ) -> None:
        """`metrics` has the series of the models, `grpc` is the address of the gRPC service."""
        limits = RequestLimits.of(server)
        self._models, self._delay = models, server.shutdown_delay
        self._tracer = Tracer(server.otlp_endpoint, __version__) if server.otlp_endpoint else None
        store = None
        if server.manage_models:
            from penstock.cli.models.store import LocalStore

            store = LocalStore(lambda: [path for serving in models.all for path in serving.paths()])
        limits = limits if siblings is None else limits.share(server.api_processes)
        fallbacks = None
        try:
            if server.providers:
                from penstock.frontend.providers.gateway import open_gateway

                others = () if siblings is None else None
                fallbacks = open_gateway(server.providers, models, metrics, server.api_processes, others)
            if siblings is None:
                check_summariser(server.context_policy, [*models.names(), *models.absent_names()])
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.app = create_app(models, server, metrics, limits, self._tracer, store, siblings, fallbacks)
        self.tls = check_tls(server)
        if (tls := self.tls) is not None:
            metrics.certificate_end = lambda: tls.certificate.not_after
        self.grpc = None
        if grpc is not None:
            from penstock.frontend.kserve.grpc import GRPCServer

            self.grpc = GRPCServer(self.app, *grpc, self.tls, shares_port=siblings is not None)

    async def run(
        self,
        sock: socket.socket,
        ready: Callable[[], None],
        *,
        stop: asyncio.Event | None = None,
        hurry: asyncio.Event | None = None,
    ) -> None:
        """Answers as `penstock.frontend.serve` does, and raises what that does. `ready` is called at the begin."""

        def begin() -> None:
            gc.freeze()  # what exists now lives as long as the server: later collections need not scan it
            gc.enable()
            ready()

        sys.setswitchinterval(SWITCH_SECONDS)
        with contextlib.ExitStack() as kept:
            for serving in self._models.all[:1]:  # with a repository there may be none, and others later
                kept.enter_context(off_the_loop(serving.versions))
            try:
                await serve_http(
                    self.app,
                    sock,
                    tls=self.tls,
                    stop=stop,
                    hurry=hurry,
                    ready=begin,
                    beside=self.grpc,
                    delay=self._delay,
                )
            finally:
                if self._tracer is not None:
                    self._tracer.close()
