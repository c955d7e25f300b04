"""Runs a gRPC call through the app, as a request to one of KServe's HTTP routes."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
import orjson

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.access import Access
from penstock.frontend.http.asgi import Headers, Message, Send
from penstock.frontend.http.buffers import HeldBytes
from penstock.frontend.http.inner import InnerRequest
from penstock.frontend.kserve.shared_memory import ClientMemory
from penstock.frontend.limits import RequestLimits
from penstock.frontend.requests.deadlines import HEADER, MOST
from penstock.messages.tensors import TensorModels
from penstock.tasks import TimeLimit

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_log = logging.getLogger("penstock.frontend")
_PASSED_ON = ("authorization", "x-api-key", "x-request-id", "traceparent", "tracestate")  # of a call's metadata
_ANSWERED = (b"x-request-id", b"retry-after", b"x-should-retry")  # headers that go into the metadata of an answer


class HTTPAnswer(NamedTuple):
    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def message(self) -> str:
        try:
            error = orjson.loads(self.body)["error"]
        except (ValueError, KeyError, TypeError):
            return f"status {self.status}"
        return str(error["message"] if isinstance(error, dict) else error)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        found = ((name, self.headers.get(name)) for name in _ANSWERED)
        return tuple((name.decode(), value.decode()) for name, value in found if value is not None)


class Calls:
    def __init__(self, app: Access, *, tls: bool) -> None:
        self._app = app
        self._scheme = "https" if tls else "http"

    @property
    def limits(self) -> RequestLimits:
        return self._app.limits

    @property
    def tensors(self) -> TensorModels | None:
        """The one-shot models of a repository; None: there is no repository."""
        return self._app.models.tensors

    @property
    def memory(self) -> ClientMemory | None:
        """The shared memory that clients may pass tensors in; None: they may not."""
        return self._app.models.memory

    def in_flight(self) -> AbstractContextManager[None]:
        """Counts a request that does not run through the app. Raises APIError 429 or 503."""
        return self._app.in_flight()

    def count(self, route: str, status: int) -> None:
        """Counts the answer to such a request."""
        self._app.count(route, status)

    def stream(self) -> AbstractContextManager[None]:
        """Counts a stream as long as the block runs. Raises APIError 429 if too many are open."""
        return self._app.open_socket()

    async def check_key(self, context: Any) -> None:
        """Ends a call that has no valid key. Called before anything of its messages is received."""
        if not self._app.keys.required:
            return
        try:
            self._app.check_key(_headers(context, None))
        except APIError:
            with self.answering() as unread:
                await fail(context, await self.ask(context, unread, "/v2"))  # the app refuses, counts and logs it

    @contextlib.contextmanager
    def answering(self) -> Iterator[HeldBytes]:
        """Counts the bytes of an answer until the block ends, which must be after its client has read it."""
        unread = self._app.unread.hold()
        try:
            yield unread
        finally:
            unread.release()

    async def receive(self, context: Any) -> bytes:
        """The one message of a call. Raises APIError 400 or 408."""
        try:
            with TimeLimit(self.limits.body_timeout):
                message = await context.read()
        except TimeoutError:
            seconds = self.limits.body_timeout
            raise APIError(408, f"the message did not arrive within {seconds:g} s", code="body_timeout") from None
        if not isinstance(message, bytes):
            raise invalid("the call ended without a message")
        return message

    async def write(self, context: Any, message: Any, handler: "asyncio.Task[None] | None" = None) -> None:
        """Sends a message. Cancels the call if its client does not read for too long: a status would not reach it
        either. `handler` is the call's task; None: the current one."""
        handler = handler or asyncio.current_task()
        assert handler is not None
        if handler.cancelling():
            return
        try:
            with TimeLimit(self.limits.write_timeout):
                await context.write(message)
        except TimeoutError:
            _log.info("a gRPC call is cancelled: its client reads nothing for %g s", self.limits.write_timeout)
            handler.cancel()

    async def ask(self, context: Any, unread: HeldBytes, path: str, body: bytes | None = None) -> HTTPAnswer:
        """Returns the app's answer, which `unread` counts. Without a body, the request is a GET request."""
        status, headers, parts = 0, {}, []

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            else:
                parts.append(message.get("body", b""))

        await self.send(context, unread, path, body, send)
        return HTTPAnswer(status, headers, b"".join(parts))

    async def send(self, context: Any, unread: HeldBytes, path: str, body: bytes | None, send: Send) -> None:
        """Runs a request whose answer goes to `send`, and which `unread` counts. If the call is cancelled, so is the
        request."""
        connection = {"asgi": {"version": "3.0"}, "scheme": self._scheme, "client": _client(context), "server": None}
        headers = _headers(context, self._app.limits.request_timeout)
        request = InnerRequest(self._app, connection, path, body, headers, unread)
        running = asyncio.create_task(request.run(send))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            request.cancel()  # it then ends, and is logged, as one whose client closed the connection
            with contextlib.suppress(Exception):
                await running
            raise

    async def answer(self, context: Any, unread: HeldBytes, path: str, body: bytes | None = None) -> bytes:
        """Returns the body of the app's answer, which `unread` counts. An error ends the call."""
        answer = await self.ask(context, unread, path, body)
        if answer.status >= 400:
            await fail(context, answer)
        context.set_trailing_metadata(answer.metadata())
        return answer.body


async def fail(context: Any, error: HTTPAnswer | APIError) -> None:
    """Ends a call with the gRPC status of an error. Never returns."""
    metadata = error.metadata() if isinstance(error, HTTPAnswer) else ()
    code = _CODES.get(error.status, grpc.StatusCode.INTERNAL if error.status >= 500 else grpc.StatusCode.UNKNOWN)
    await context.abort(code, error.message, metadata)


def _headers(context: Any, request_timeout: float | None) -> Headers:
    headers: Headers = [(b"host", b"localhost")]
    for name, value in context.invocation_metadata() or ():
        if name in _PASSED_ON and isinstance(value, str):
            headers.append((name.encode(), value.encode("latin-1", "replace")))
    left = context.time_remaining()
    if left is not None and math.isfinite(left):
        seconds = min(max(left, 0.001), request_timeout or MOST)
        headers.append((HEADER.lower().encode(), b"%.3f" % seconds))
    return headers


def _client(context: Any) -> tuple[str, int] | None:
    """The address of the other end, which gRPC writes as ipv4:HOST:PORT or ipv6:%5BHOST%5D:PORT."""
    host, _, port = unquote(context.peer()).partition(":")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() else None
