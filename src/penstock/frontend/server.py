"""Listens, serves until a signal, and stops."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import cast

import uvicorn

from penstock.frontend.access import Access
from penstock.frontend.connection import BoundedProtocol
from penstock.messages import EngineClient, EngineError

_LOOK_SECONDS = 0.5  # between looks at the engine

_log = logging.getLogger("penstock.server")


class AddressInUse(OSError):
    """The server cannot listen on the address. The message says why and what to change."""

    def __str__(self) -> str:
        return str(self.strerror)


def listen(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """Returns a listening socket; port 0 takes a free port. Raises AddressInUse.

    Call it before the model is loaded, so that a port that is in use is reported at once.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressInUse(error.errno, f"cannot listen on {host}: {error.strerror}; choose another --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is in use; stop what listens there, or choose another --port"
        else:
            message = f"cannot listen on port {port} of {host}: {error.strerror}; choose another --host or --port"
        raise AddressInUse(error.errno, message) from error
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


async def serve(
    app: Access,
    sock: socket.socket,
    client: EngineClient,
    *,
    stop: asyncio.Event | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves on a listening socket until SIGTERM or SIGINT, or until `stop` is set if it is given.

    `ready` is called once requests are answered and signals are handled. On a signal the server refuses new requests,
    lets those in flight finish for at most `drain_timeout`, and closes the client and the socket. A second signal ends
    that wait. Requests that are still in flight then end with the engine's error. Run it on uvloop:
    `asyncio.Runner(loop_factory=uvloop.new_event_loop)`.

    Raises EngineError at the end if the engine ended for good: the server then ends too, so that what started it can
    start it again.
    """
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(BoundedProtocol, app.limits)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(app.limits.keep_alive_timeout),
        timeout_graceful_shutdown=5,  # to send the rest of the answers, after drain_timeout
    )
    server = _Server(config, ready)
    async with _stopping(stop) as (stopping, hurry):
        running = asyncio.create_task(server.serve(sockets=[sock]))
        stopped = asyncio.create_task(stopping.wait())
        given_up = asyncio.create_task(_until_ended(client))
        try:
            await asyncio.wait((running, stopped, given_up), return_when=asyncio.FIRST_COMPLETED)
            if client.healthy:
                await _drain(app, hurry)
        finally:
            stopped.cancel()
            given_up.cancel()
            app.lifecycle.draining = True
            ended = not client.healthy
            await client.close()  # requests that are still in flight end now, with an error
            server.should_exit = True
            await running
    if ended:
        raise EngineError("the engine ended before the server was stopped; the log above says why")


async def _until_ended(client: EngineClient) -> None:
    """Returns a moment after the engine has ended for good: its streams send their errors meanwhile."""
    while client.healthy:
        await asyncio.sleep(_LOOK_SECONDS)
    await asyncio.sleep(_LOOK_SECONDS)


async def _drain(app: Access, hurry: asyncio.Event) -> None:
    """Refuses new requests, and waits for those in flight to finish."""
    lifecycle = app.lifecycle
    lifecycle.draining = True
    _log.info("stopping: requests in flight may finish", extra={"fields": {"requests": lifecycle.in_flight}})
    if not lifecycle.in_flight:
        return
    waits = [asyncio.create_task(lifecycle.idle()), asyncio.create_task(hurry.wait())]
    await asyncio.wait(waits, timeout=app.limits.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    if lifecycle.in_flight:
        _log.warning(
            "stopping: requests did not finish in time and are aborted",
            extra={"fields": {"requests": lifecycle.in_flight}},
        )


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers. uvicorn's own would stop listening at once, without answering 503."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _stopping(stop: asyncio.Event | None) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Two events: stop, and stop without waiting. Signals set them, unless `stop` is given."""
    hurry = asyncio.Event()
    if stop is not None:
        yield stop, hurry
        return
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stopping, hurry
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
