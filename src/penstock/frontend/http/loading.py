"""Answers on the server's port while the model is loaded: /livez with 200, all else with 503."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import cast

import orjson

from penstock.frontend.error_body import error_body
from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import LIVE_PATHS, READY_PATHS

STATUS = "the model is loaded"
RETRY_AFTER = 1  # seconds
_LIVE = {path.encode() for path in LIVE_PATHS}
_READY = {path.encode() for path in READY_PATHS}
_HEADER_BYTES = 64 << 10  # of one request
_HEADER_SECONDS = 15.0  # from a connection to the end of its request's headers
_CLOSE_SECONDS = 1.0  # from an answer to the end of its connection, in which the client may read it
_CONNECTIONS = 1024  # at a time; the next ones are closed
_ERROR = APIError(
    503,
    "the server is loading its model; try again later, or when GET /readyz answers 200",
    code="model_loading",
    retry_after=RETRY_AFTER,
)


@contextlib.asynccontextmanager
async def answering_early(sock: socket.socket, context: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Answers on a listening socket as long as the block runs, over TLS with `context`. The socket stays open."""
    open_connections: set[asyncio.BaseTransport] = set()
    # The server closes its socket; a duplicate is the same socket for the kernel.
    server = await asyncio.get_running_loop().create_server(
        lambda: _EarlyConnection(open_connections), sock=sock.dup(), ssl=context
    )
    try:
        yield
    finally:
        server.close()  # connections that have not sent a request yet get their answer all the same


class _EarlyConnection(asyncio.Protocol):
    """Reads the headers of one request, answers it, and closes the connection."""

    def __init__(self, others: set[asyncio.BaseTransport]) -> None:
        self._others = others
        self._received = bytearray()
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        if len(self._others) >= _CONNECTIONS:
            transport.abort()
            return
        self._others.add(transport)
        self._end = asyncio.get_running_loop().call_later(_HEADER_SECONDS, transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport in self._others:
            self._others.remove(self._transport)
            self._end.cancel()

    def data_received(self, data: bytes) -> None:
        if self._answered:  # the rest of a body, which is not read
            return
        self._received += data
        if b"\r\n\r\n" in self._received or len(self._received) > _HEADER_BYTES:
            self._answered = True
            self._transport.write(_answer(bytes(self._received)))
            self._received.clear()
            self._end.cancel()
            self._end = asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._transport.close)

    def eof_received(self) -> bool:
        return self._answered  # the client may have sent all, and still read


def _answer(request: bytes) -> bytes:
    method, _, rest = request.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path in _LIVE:
        status, body = b"200 OK", orjson.dumps({"status": "alive"})
    elif path in _READY:
        status, body = b"503 Service Unavailable", orjson.dumps({"status": STATUS})
    else:
        status, body = b"503 Service Unavailable", error_body(_ERROR)
    after = b"" if path in _LIVE else b"retry-after: %d\r\n" % RETRY_AFTER
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, after, len(body)) + (b"" if method == b"HEAD" else body)
