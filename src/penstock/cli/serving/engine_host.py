"""Implements `penstock engine`: an engine without HTTP, which servers elsewhere share (docs/fleet.md)."""

import asyncio
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cli.options import Flags
from penstock.cli.serving.preemption import watch_for_preemption
from penstock.cli.serving.report import log, show_end, show_memory
from penstock.engine.link.engine_child import EngineChild

if TYPE_CHECKING:
    import ssl

    from penstock.engine.client import StreamingClient
    from penstock.messages import ControlAnswer, ControlMessage, EngineRole
    from penstock.prepare.model import PreparedModel

LOOK_SECONDS = 0.05  # between looks whether the last request has left
MARGIN_SECONDS = 5.0  # beyond the grace of a drain, for fronts to move their requests


def serve_engine(
    model: str | None,
    listen: str,
    flags: Flags,
    engine: EngineChild | None = None,
    *,
    role: "EngineRole" = "alone",
    page_port: int = 0,
) -> None:
    """Runs an engine until SIGTERM, SIGINT or a drain, after which it takes no new requests and lets those in progress
    end or move. `engine` is the engine process if the caller has already started one. With a role, other engines read
    KV blocks at `page_port`."""
    began = time.monotonic()
    gc.disable()  # until the engine is ready
    try:
        engine = engine or EngineChild()
    except OSError as error:
        sys.exit(f"penstock: cannot start the engine process: {error}")
    with engine as child:
        import uvloop

        from penstock.cli.address import bind
        from penstock.config import ConfigError
        from penstock.config.addresses import split_address
        from penstock.config.resolve import is_loopback
        from penstock.messages import EngineError
        from penstock.observe.logs import configure_logging
        from penstock.prepare.model import find_given, prepare_found, read_given

        host, port = split_address(listen, "--listen")
        given = read_given(model, flags)
        if not (given.settings.fleet_key or given.settings.allow_insecure_bind or is_loopback(host)):
            raise ConfigError(
                f"--listen is {listen}, which other machines can reach, and no key is required; set PENSTOCK_FLEET_KEY "
                "here and for the servers, or --allow-insecure-bind if anyone who reaches it may use it"
            )
        sock = bind(host, port, "--listen")
        # Fronts may have tenants: the engine divides itself among those that requests name, and measures their use.
        prepared = prepare_found(find_given(given)).with_engine(has_tenants=True)
        if role != "alone":
            prepared = _with_role(prepared, role, host, page_port)
        child.send_config(prepared.resolved.engine)
        server = prepared.resolved.server
        configure_logging(server.log_level, server.log_format)
        show_memory(prepared.resolved)
        watch_for_preemption(server.preemption_notice)
        try:
            uvloop.run(_main(prepared, child, sock, began))
        except (EngineError, OSError) as error:
            show_end(prepared.resolved, error)
            sys.exit(1)


def _with_role(prepared: "PreparedModel", role: "EngineRole", host: str, page_port: int) -> "PreparedModel":
    """Returns the model with an engine that exchanges KV blocks. Raises ConfigError if it cannot."""
    from penstock.config import ConfigError
    from penstock.config.engine import PageAccess

    engine, server = prepared.resolved.engine, prepared.resolved.server
    if engine.device != "cpu" or engine.split.world > 1 or not engine.enable_prefix_caching:
        raise ConfigError(f"--role is {role}, which needs --device cpu, one rank and --enable-prefix-caching")
    if bool(server.tls_certificate) != bool(server.fleet_ca):
        raise ConfigError(
            f"--role is {role}, and KV blocks go both ways between engines: set both --tls-certificate and --fleet-ca, "
            "or none"
        )
    files = {"certificate": server.tls_certificate, "private_key": server.tls_key, "authority": server.fleet_ca}
    pages = PageAccess(host=host, port=page_port, key=server.fleet_key, **files)
    return prepared.with_engine(role=role, pages=pages)


async def _main(prepared: "PreparedModel", child: EngineChild, sock: socket.socket, began: float) -> None:
    from penstock.engine.link.ipc import connect
    from penstock.prepare.checks import check_tls
    from penstock.prepare.engine import verified
    from penstock.weights.manifest import ManifestCheck

    check = ManifestCheck(prepared.path)
    client = await verified(connect(prepared.resolved.engine, child, resumes=True), check)
    try:
        tls = check_tls(prepared.resolved.server)
        host = EngineHost(client, prepared)
        gc.freeze()
        gc.enable()
        sock.listen()
        sock.setblocking(False)
        address = "{}:{}".format(*sock.getsockname()[:2])

        def ready() -> None:
            seconds = time.monotonic() - began
            log.info("the engine of %s listens on %s, ready after %.1f s", client.info.model, address, seconds)

        await host.run(sock, None if tls is None else tls.context, ready)
    finally:
        await client.close()


class EngineHost:
    """An engine, and the hub that its fronts share."""

    def __init__(self, client: "StreamingClient", prepared: "PreparedModel") -> None:
        from penstock.engine.remote.connector import HUB
        from penstock.engine.shared.hub import Hub

        self._client, self._prepared = client, prepared
        self._hub = Hub(client, HUB)
        self._drained = asyncio.Event()
        self._ends_at = 0.0

    async def run(self, sock: socket.socket, tls: "ssl.SSLContext | None", ready: Callable[[], None]) -> None:
        """Serves fronts until a drain or a signal, and until their requests have left. Raises EngineError if the engine
        ends for good."""
        from penstock.engine.remote.listener import Listener
        from penstock.messages import EngineError

        loop = asyncio.get_running_loop()
        listener = Listener(self._hub, self._operate, self._prepared.resolved.server.fleet_key)
        await listener.start(sock, tls)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        ready()
        try:
            while not (self._drained.is_set() and (not self._hub.requests or loop.time() >= self._ends_at)):
                if self._client.failure:
                    raise EngineError(self._client.failure)
                await asyncio.sleep(LOOK_SECONDS)
            log.info("the engine ends; %d requests are left", self._hub.requests)
        finally:
            await listener.close()
            self._hub.close()

    def drain(self, grace: float) -> None:
        """Takes no new requests. Those in progress may stay for `grace` seconds; a second call can only shorten it."""
        before = self._hub.leave_within
        if before is None or grace < before:
            self._hub.leave_within = grace
            self._hub.flush_soon()
            self._ends_at = asyncio.get_running_loop().time() + grace + MARGIN_SECONDS
            log.info("the engine drains: %d requests, which may stay for %g s", self._hub.requests, grace)
        self._drained.set()

    def _signalled(self) -> None:
        """The first signal drains; the second lets requests move at once."""
        self.drain(0.0 if self._drained.is_set() else self._prepared.resolved.server.drain_timeout)

    async def _operate(self, message: "ControlMessage") -> "ControlAnswer":
        from penstock.messages import Completed, Describe, Drain
        from penstock.prepare.described import describe

        match message:
            case Drain(grace):
                self.drain(grace)
                return Completed()
            case Describe():
                return await asyncio.to_thread(describe, self._prepared)
        return await self._client.control(message)
