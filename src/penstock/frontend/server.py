"""Listening, serving and stopping."""

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
from penstock.frontend.protocol import BoundedProtocol
from penstock.messages import EngineClient, EngineError

_log = logging.getLogger("penstock.server")


class AddressInUse(OSError):
    """The address cannot be listened on. `str` says why and what to change."""

    def __str__(self) -> str:
        return str(self.strerror)


def listen(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A listening socket; port 0 takes a free one. Done before a model is loaded, so that a clash shows at once.

    Raises AddressInUse.
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
    """Where a listening socket is reached, as clients write it."""
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
    """Serves on a listening socket until SIGTERM or SIGINT; or until `stop` is set, where it is given. `ready` is
    called once requests are answered and a signal lets them finish.

    Then it takes no new requests, lets those in flight finish for at most the limits' `drain_timeout`, and closes the
    client and the socket. A second signal cuts the waiting short. What is still in flight then ends with the engine's
    error. To be run by uvloop: `asyncio.Runner(loop_factory=uvloop.new_event_loop)`.

    Raises EngineError at the end if the engine had ended before: whoever started the server is to know.
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
        timeout_graceful_shutdown=5,  # to write out what is left; requests have had `drain_timeout` already
    )
    server = _Server(config, ready)
    async with _stopping(stop) as (stopping, hurry):
        running = asyncio.create_task(server.serve(sockets=[sock]))
        stopped = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            await _drain(app, hurry)
        finally:
            stopped.cancel()
            app.lifecycle.draining = True
            ended = not client.healthy
            await client.close()  # whatever is still in flight ends now, with an error of its own
            server.should_exit = True
            await running
    if ended:
        raise EngineError("the engine ended before the server was stopped; the log above says why")


async def _drain(app: Access, hurry: asyncio.Event) -> None:
    """Refuses new requests and waits for those in flight."""
    lifecycle = app.lifecycle
    lifecycle.draining = True
    _log.info("stopping; requests in flight may finish", extra={"fields": {"requests": lifecycle.in_flight}})
    if not lifecycle.in_flight:
        return
    waits = [asyncio.create_task(lifecycle.idle()), asyncio.create_task(hurry.wait())]
    await asyncio.wait(waits, timeout=app.limits.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    if lifecycle.in_flight:
        _log.warning("cutting requests short", extra={"fields": {"requests": lifecycle.in_flight}})


class _Server(uvicorn.Server):
    """Leaves signals to us. uvicorn would stop listening at once; we answer 503 until the last stream has ended."""

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
    """Two events: stop, and stop without waiting. Set by signals, unless the caller has an event of its own."""
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
