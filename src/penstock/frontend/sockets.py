"""Serves a WebSocket: each message may begin a request, which runs through the app as if it came over HTTP."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from penstock.frontend.errors import APIError, as_api_error
from penstock.frontend.http.access import KEY_PROTOCOL, bearer
from penstock.frontend.http.asgi import Answer, ASGIApp, Headers, Message, Receive, Scope, Send
from penstock.frontend.http.body import check_json
from penstock.frontend.http.buffers import ByteBudget, HeldBytes
from penstock.frontend.http.inner import InnerRequest
from penstock.frontend.http.sse import STREAM_TYPE, sse_data
from penstock.frontend.limits import RequestLimits

_OF_HANDSHAKE = frozenset(
    (b"connection", b"upgrade", b"x-request-id", b"content-type", b"content-length", b"authorization", b"x-api-key")
)
_log = logging.getLogger("penstock.frontend")


class SocketRequest(NamedTuple):
    """A message that begins a request."""

    key: str  # no other request in flight on the socket has it
    path: str  # of the route that answers it
    body: bytes


class SocketCancel(NamedTuple):
    """A message that ends a request early."""

    key: str


class SocketCodec(Protocol):
    """Reads and writes the messages of one WebSocket as a wire does. A message to the client is JSON."""

    at_once: int | None  # requests that run at a time, others wait; None: all that the limits allow
    decodes_all: bool  # `read` decodes a whole message, so its parts must be counted before; else the route counts them

    def read(self, message: bytes) -> SocketRequest | SocketCancel:
        """Raises APIError, whose answer is a failure without a key."""

    def event(self, key: str, data: bytes) -> bytes:
        """The data of one event of a stream as a message, or nothing."""

    def whole(self, key: str, body: bytes) -> bytes:
        """A whole answer as a message."""

    def failure(self, key: str | None, status: int, body: bytes, retry_after: int | None) -> bytes:
        """An error as a message. `body` is what the wire answers over HTTP, `retry_after` is in seconds. No key: it is
        not about one request."""

    def cancelled(self, key: str) -> bytes:
        """The message that ends a request that was cancelled."""


class SocketSession:
    """One WebSocket, from its handshake to its end."""

    def __init__(
        self,
        scope: Scope,
        send: Send,
        codec: SocketCodec,
        limits: RequestLimits,
        bodies: ByteBudget,
        unread: ByteBudget,
        encode_error: Callable[[APIError], Answer],
    ) -> None:
        self._scope = scope
        self._app: ASGIApp = scope["penstock.app"]
        self._headers = _headers(scope)
        self._send = send
        self._codec = codec
        self._limits = limits
        self._bodies = bodies
        self._unread = unread
        self._encode_error = encode_error
        self._requests: dict[str, InnerRequest] = {}
        self._turns = asyncio.Semaphore(codec.at_once or limits.max_socket_requests)
        self._closed = False

    async def run(self, receive: Receive) -> None:
        """Accepts the handshake, and returns when the socket is closed and its requests have ended."""
        await receive()  # the handshake
        await self._send({"type": "websocket.accept", "subprotocol": _subprotocol(self._scope)})
        async with asyncio.TaskGroup() as tasks:
            while (message := await receive())["type"] == "websocket.receive":
                await self._take(message, tasks)
                await asyncio.sleep(0)  # other streams go on before the next message, which may be there already
            self._close()

    async def _take(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        """Begins or cancels a request. Waits only for its turn to count the parts of a large message, and if the
        message is wrong and the client does not read its answers."""
        text: str | None = message.get("text")
        key = None
        waiting = self._bodies.hold()
        try:
            data = message["bytes"] if text is None else text.encode()
            waiting.add(len(data))
            # The route counts the brackets that a codec leaves to it. But to find the end takes 15 ns a bracket.
            if self._codec.decodes_all or data.count(b"[") + data.count(b"{") > self._limits.max_json_containers:
                await check_json(data, self._limits, waiting)
            read = self._codec.read(data)
            if isinstance(read, SocketCancel):
                waiting.release()
                if read.key in self._requests:  # else it has just ended
                    self._requests[read.key].cancel()
                return
            key = read.key
            self._check(key)
        except Exception as error:
            waiting.release()
            await self._fail(key, error)
            return
        request = InnerRequest(self._app, self._scope, read.path, read.body, self._headers, self._unread.hold())
        self._requests[key] = request
        tasks.create_task(self._run(key, request, waiting))

    def _close(self) -> None:
        """Aborts all requests."""
        self._closed = True
        for request in self._requests.values():
            request.cancel()

    def _check(self, key: str) -> None:
        if key in self._requests:
            message = f"a request with the id {key!r} is in flight on this socket; use another id"
            raise APIError(400, message, param="id", code="duplicate_id")
        most = self._limits.max_socket_requests
        if len(self._requests) >= most:
            message = f"{most} requests are in flight on this socket, the limit; wait until one ends"
            raise APIError(429, message, code="too_many_requests", retry_after=self._limits.retry_after)

    async def _run(self, key: str, request: InnerRequest, waiting: HeldBytes) -> None:
        reply = _Reply(key, self._codec, self._write)
        try:
            async with self._turns:
                waiting.release()  # the route counts the body from here on
                if not request.cancelled:
                    await request.run(reply.send)
        except Exception as error:
            await self._fail(key, error)
        else:
            await reply.end(request.cancelled)
        finally:
            waiting.release()
            request.unread.release()
            del self._requests[key]

    async def _fail(self, key: str | None, error: Exception) -> None:
        known = as_api_error(error, self._limits.retry_after)
        if known is not error:
            _log.error("a message of a WebSocket failed", exc_info=error)
        encoded = self._encode_error(known)
        await self._write(self._codec.failure(key, encoded.status, encoded.body, known.retry_after))

    async def _write(self, data: bytes) -> None:
        """Sends a message. Waits while the client does not read; does nothing when it is gone."""
        if self._closed:
            return
        try:
            await self._send({"type": "websocket.send", "text": data.decode()})
        except OSError:  # uvicorn's ClientDisconnected
            self._closed = True


class _Reply:
    """Sends what the app answers to one request as messages."""

    def __init__(self, key: str, codec: SocketCodec, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._key = key
        self._codec = codec
        self._write = write
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._streams = False
        self._parts: list[bytes] = []
        self._complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = dict(message["headers"])
            self._streams = self._headers.get(b"content-type") == STREAM_TYPE
            return
        self._complete = not message.get("more_body", False)
        if not self._streams:
            self._parts.append(message["body"])
            return
        for data in sse_data(message["body"]):
            if encoded := self._codec.event(self._key, data):
                await self._write(encoded)

    async def end(self, cancelled: bool) -> None:
        """Sends a whole answer, an error, or that the request was cancelled before its answer was complete."""
        if not self._complete:
            if cancelled:
                await self._write(self._codec.cancelled(self._key))
        elif not self._streams:
            body = b"".join(self._parts)
            if self._status < 400:
                await self._write(self._codec.whole(self._key, body))
            else:
                after = self._headers.get(b"retry-after")
                seconds = None if after is None else int(after)
                await self._write(self._codec.failure(self._key, self._status, body, seconds))


def _subprotocol(scope: Scope) -> str | None:
    """The first subprotocol offered that is not a key. A browser fails if it offers some and the server takes none."""
    return next((name for name in scope["subprotocols"] if not name.startswith(KEY_PROTOCOL)), None)


def _headers(scope: Scope) -> Headers:
    """The headers of the handshake that each request has, too, with the key in the usual place."""
    headers: Headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _OF_HANDSHAKE and not name.startswith(b"sec-websocket-")
    ]
    if key := bearer(scope):
        headers.append((b"authorization", b"Bearer " + key))
    return headers
