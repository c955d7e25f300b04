"""Serves on a socket until a signal arrives, then drains and stops."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Protocol, cast

import uvicorn

from penstock.frontend.errors import APIError
from penstock.frontend.http.access import Access
from penstock.frontend.http.connection import BoundedProtocol
from penstock.frontend.http.tls import TLS
from penstock.frontend.registry import ModelRegistry
from penstock.messages import EngineError

_ENVELOPE_BYTES = 4 << 10  # of a WebSocket's message around a body
_LOOK_SECONDS = 0.5  # between checks whether the engine has ended
# Signals that arrive this close together are one request to stop: `timeout` and `make` send SIGTERM to their process
# group and once more to the server.
ONE_STOP_SECONDS = 1.0
CLOSE_SECONDS = 5  # to send the rest of the answers after drain_timeout; only a client that does not read takes as long
HURRIED_SECONDS = 1  # the same after a second signal

_log = logging.getLogger("penstock.server")


class Beside(Protocol):
    """A server of another protocol in the same process, for the same app."""

    async def start(self) -> None:
        """Starts to serve. Raises OSError if the address cannot be used."""

    async def stop(self, seconds: float) -> None:
        """Refuses new calls, and ends those that are left after `seconds`."""


async def serve(
    app: Access,
    sock: socket.socket,
    *,
    tls: TLS | None = None,
    stop: asyncio.Event | None = None,
    hurry: asyncio.Event | None = None,
    ready: Callable[[], None] = lambda: None,
    beside: Beside | None = None,
    delay: float = 0.0,
) -> None:
    """Serves on a listening socket until SIGTERM or SIGINT, or until `stop` is set if it is given; `hurry` is then the
    second signal.

    `ready` is called once requests are answered and signals are handled. On a signal the server reports that it is not
    ready, and serves on for `delay` seconds, so that load balancers notice. It then refuses new requests, lets those in
    flight finish for at most `drain_timeout`, and closes the engines and the socket. A second signal, a second or more
    after the first, ends these waits: requests that are still in flight end with the engine's error.
    SIGHUP reads the certificate of `tls` and the file of API keys again, and reloads the model if it or its settings
    have changed. The signals stay handled until the event loop is closed. Run it on uvloop:
    `asyncio.Runner(loop_factory=uvloop.new_event_loop)`.

    Raises EngineError at the end if the engine ended for good: the server then ends too, so that what started it can
    start it again. `beside` starts and stops with the server.
    """
    if beside is not None:
        await beside.start()
    config = _uvicorn_config(app, tls)
    server = _Server(config, ready)
    if stop is None:
        stopping, hurry = handle_signals(lambda: _hang_up(tls, app))
    else:
        stopping, hurry = stop, hurry or asyncio.Event()
    watching = None if tls is None else asyncio.create_task(tls.watch())
    background = None if app.background is None else asyncio.create_task(app.background.run())
    running = asyncio.create_task(server.serve(sockets=[sock]))
    stopped = asyncio.create_task(stopping.wait())
    given_up = asyncio.create_task(_until_ended(app.models))
    try:
        await asyncio.wait((running, stopped, given_up), return_when=asyncio.FIRST_COMPLETED)
        if app.models.healthy:
            await _serve_on(app, delay, hurry, running, given_up)
            await _drain(app, hurry)
    finally:
        stopped.cancel()
        given_up.cancel()
        if watching is not None:
            watching.cancel()
        app.lifecycle.draining = True
        if background is not None:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
        ended = not app.models.healthy
        await app.models.close()  # requests that are still in flight end now, with an error
        server.should_exit = True
        if beside is not None:
            await beside.stop(HURRIED_SECONDS)
        if hurry.is_set():
            config.timeout_graceful_shutdown = HURRIED_SECONDS
        await running
        if app.background is not None:
            await app.background.close()
        if app.office is not None:
            await app.office.close()
    if ended:
        raise EngineError("the engine ended before the server was stopped; the log above says why")


def _uvicorn_config(app: Access, tls: TLS | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(BoundedProtocol, app.limits, app.refuse, app.is_socket)),
        ws=cast(type[asyncio.Protocol], partial(_socket_protocol, app)),
        ws_max_size=app.limits.max_body_bytes + _ENVELOPE_BYTES,
        ws_ping_interval=app.limits.ping_interval,
        ws_ping_timeout=app.limits.ping_interval,
        ws_per_message_deflate=False,  # a small message may become a large one
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(app.limits.keep_alive_timeout),
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    config.load()
    config.ssl = None if tls is None else tls.context
    return config


def _socket_protocol(app: Access, **connection: Any) -> asyncio.Protocol:
    """The protocol of a connection that becomes a WebSocket."""
    from penstock.frontend.http.websocket import BoundedSocket  # slow to import, and few servers need it

    return BoundedSocket(app.limits, app.bodies, **connection)


async def _until_ended(models: ModelRegistry) -> None:
    """Returns 0.5 s after the engine has ended for good, so that streams can send their errors first."""
    while models.healthy:
        await asyncio.sleep(_LOOK_SECONDS)
    await asyncio.sleep(_LOOK_SECONDS)


async def _serve_on(app: Access, seconds: float, hurry: asyncio.Event, *ends: asyncio.Task[None]) -> None:
    """Reports that the server is not ready, and answers requests for so long, or until `hurry` or one of `ends`."""
    app.lifecycle.stopping = True
    if not seconds:
        return
    _log.info("stopping: requests are answered for %g s more, while /readyz is 503 (--shutdown-delay)", seconds)
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait((hurried, *ends), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()


async def _drain(app: Access, hurry: asyncio.Event) -> None:
    """Refuses new requests, and waits for those in flight to finish."""
    lifecycle = app.lifecycle
    lifecycle.draining = True
    if not lifecycle.requests:
        _log.info("stopping: no requests are in flight")
        return
    seconds = app.limits.drain_timeout
    _log.info(
        "stopping: %d requests in flight have %g s to finish (--drain-timeout), new ones get 503; "
        "a second signal ends them at once",
        lifecycle.requests,
        seconds,
    )
    waits = [asyncio.create_task(lifecycle.unused()), asyncio.create_task(hurry.wait())]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    if lifecycle.requests:
        why = "a second signal came" if hurry.is_set() else f"{seconds:g} s are over (--drain-timeout)"
        _log.warning("stopping: %d requests are aborted, as %s", lifecycle.requests, why)


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


def handle_signals(hang_up: Callable[[], Awaitable[None]]) -> tuple[asyncio.Event, asyncio.Event]:
    """Returns two events that signals set: stop, and stop without waiting. SIGHUP runs `hang_up`.

    The handlers stay until the loop is closed: a late signal must not turn a clean end into a kill.
    """
    stopping, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    first = 0.0
    tasks: set[asyncio.Future[None]] = set()  # the loop itself keeps no task alive

    def on_signal(number: signal.Signals) -> None:
        nonlocal first
        if not stopping.is_set():
            first = loop.time()
            _log.info("%s received", number.name)
            stopping.set()
        elif loop.time() - first >= ONE_STOP_SECONDS:
            hurry.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)

    def on_hang_up() -> None:
        task = asyncio.ensure_future(hang_up())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, on_hang_up)
    return stopping, hurry


async def _hang_up(tls: TLS | None, app: Access) -> None:
    if tls is not None:
        asyncio.get_running_loop().run_in_executor(None, tls.reload)
    await asyncio.to_thread(app.keys.reload)
    for served in app.models.all:
        try:
            _log.info("SIGHUP: %s", await served.reloads.reload())
        except APIError as error:
            _log.error("SIGHUP: %s", error)
