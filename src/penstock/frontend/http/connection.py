"""The HTTP connection: uvicorn's httptools protocol with more limits.

uvicorn does not limit how long a client takes to send a request, how large the headers are, or how long the client
leaves its answer unread. Each of these would let a client hold a connection, and its request in the engine, forever.
It also answers malformed HTTP with plain text, where every other error of this server is JSON.
"""

import asyncio
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import Scope
from penstock.frontend.limits import RequestLimits

LINGER_SECONDS = 2.0  # for a refused client to read the answer, while what it still sends is dropped
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"
_CONTINUE = b"HTTP/1.1 100"
_CHUNKED = b"transfer-encoding: chunked\r\n"
TLS_HANDSHAKE = b"\x16"  # the first byte of one
_log = logging.getLogger("penstock.connection")

Refuse = Callable[[APIError, tuple[str, int] | None], bytes]


class BoundedProtocol(HttpToolsProtocol):
    """Closes the connection of a client that sends its request too slowly or does not read its answer."""

    def __init__(
        self,
        limits: RequestLimits,
        refuse: Refuse,
        is_socket: Callable[[bytes], bool],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """`refuse` records an error of the client at this address, and returns the body of its answer. `is_socket` says
        whether a raw path takes WebSockets."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._refuse = refuse
        self._is_socket = is_socket
        self._refused = False  # the answer to malformed HTTP was sent
        self._ignores = False  # what the client still sends, after a request that is one too many
        self._receiving: asyncio.TimerHandle | None = None
        self._unread = UnreadTimer(limits.write_timeout)
        self._header_bytes = 0  # received of a request whose headers are not complete
        self._head_is_known = False  # the parser reads headers again, to read the body after them
        # The request that is being answered. uvicorn's `cycle` is the last one received, which may wait in `pipeline`.
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._unread.stop()
        self._abort_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self._ignores:
            return
        self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if self._ignores:
                return
            cause = error.__context__
            self._answer(cause if isinstance(cause, APIError) else invalid(_explain(error, data), code="invalid_http"))
            return
        if self._header_bytes > self._limits.max_header_bytes and not self.transport.is_closing():
            self._answer(self._headers_too_large())

    def _parse(self, data: bytes) -> None:
        """Feeds the parser. It stops after the headers of a request that asks for an upgrade, and takes the rest for
        another protocol. Only a WebSocket's handshake is one; other requests are answered as if they did not ask, as
        HTTP allows. So what follows is their body, or the next request. Raises httptools.HttpParserError."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                if self._should_upgrade():
                    self._upgrade()
                    return
                data = data[stopped.args[0] :]
            if framing := self._framing():
                self.parser = httptools.HttpRequestParser(self)
                self._head_is_known = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % framing)
                self._head_is_known = False

    def _framing(self) -> tuple[bytes, bytes] | None:
        """Returns the header that says where the body of the request ends; None if it has no body."""
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ")):
                return name, value
        return None

    def on_url(self, url: bytes) -> None:
        if not self._head_is_known:
            super().on_url(url)

    def on_message_begin(self) -> None:
        if self._head_is_known:
            return
        super().on_message_begin()
        self._expect(self._limits.header_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_is_known:
            return
        super().on_header(name, value)
        if len(self.headers) > self._limits.max_headers:
            message = f"the request has more than {self._limits.max_headers} headers, the limit; send fewer"
            raise APIError(431, message, code="headers_too_large")

    def on_headers_complete(self) -> None:
        if self._head_is_known:
            return
        # The parser may get headers and body at once, so the number of bytes received is not the size of the headers.
        size = len(self.url) + 4 * len(self.headers) + sum(map(len, chain.from_iterable(self.headers)))
        if size > self._limits.max_header_bytes:
            raise self._headers_too_large()
        _check_authority(self.url, self.headers)
        too_many = len(self.pipeline) >= self._limits.max_pipelined
        super().on_headers_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            return
        cycle = self.cycle
        cast(Scope, self.scope)["penstock.gone"] = lambda: cycle.disconnected
        # A request whose body is not read to its end is closed in a way that lets the client read the answer.
        kind = _LingeringTransport if self.parser.get_http_version() != "1.0" else _UnchunkedTransport
        has_body = self.scope["method"] != "HEAD"
        self.cycle.transport = cast(asyncio.Transport, kind(self.transport, self._close, has_body=has_body))
        if too_many:
            raise self._too_many_pipelined()
        # The app answers 408 after body_timeout, or more for an upload. This later limit is for bodies that the app has
        # refused already.
        length = dict(self.headers).get(b"content-length", b"0")
        size = min(int(length) if length.isdigit() and len(length) < 20 else 0, self._limits.max_file_bytes)
        extra = size / self._limits.min_upload_rate
        self._expect(self._limits.body_timeout + extra + self._limits.header_timeout)
        self._header_bytes = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._header_bytes = 0

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return  # the parser has skipped the body, which follows
        super().on_message_complete()
        self._expect(None)
        self._header_bytes = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start(self.transport, self.loop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._unread.stop()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._end()

    def _end(self) -> None:
        """Closes the connection when the client has read what was written, or after `write_timeout`."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._unread.start(self.transport, self.loop)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _abort_requests(self) -> None:
        """Ends the request that is being answered, and the last one received. uvicorn ends the last one alone: a stream
        would go on after its client left if another request waits behind it. Requests between these never start."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _should_upgrade(self) -> bool:
        """True for the handshake of a WebSocket, which has no body."""
        if self.scope["method"] != "GET" or not self._is_socket(self.url.partition(b"?")[0]) or self._framing():
            return False
        return self._get_upgrade() == b"websocket"

    def _upgrade(self) -> None:
        """Hands the connection to the WebSocket's protocol, which answers the handshake."""
        if self.cycle is not None and not self.cycle.response_complete:
            message = "a WebSocket's handshake came before the answer to the last request; use a new connection"
            self._answer(invalid(message, code="invalid_http"))
            return
        self._expect(None)
        self.handle_websocket_upgrade()

    def _close(self) -> None:
        """Closes the connection after an answer. If more of the request may arrive, it is not read."""
        if self.cycle.more_body and not self.transport.is_closing():
            self._refused = True
            self._expect(None)
            self.flow.pause_reading()
            end_connection(self.transport, self.loop)
        else:
            self._end()

    def on_response_complete(self) -> None:
        if not self._refused:
            super().on_response_complete()

    def _headers_too_large(self) -> APIError:
        message = f"the request's headers have more than {self._limits.max_header_bytes} bytes, the limit; send less"
        return APIError(431, message, code="headers_too_large")

    def _too_many_pipelined(self) -> APIError:
        """Makes the last request received the connection's last one: the app refuses it after the earlier answers.
        Returns the error, which ends the parser."""
        self._ignores = True
        self._expect(None)
        most = self._limits.max_pipelined
        message = (
            f"more than {most} requests wait on this connection for earlier answers; the limit is {most}: read answers "
            "sooner, or open more connections"
        )
        seconds = self._limits.retry_after
        error = APIError(429, message, code="too_many_pipelined", retry_after=seconds, close=True)
        cast(Scope, self.scope)["penstock.refused"] = error
        return error

    def _answer(self, error: APIError) -> None:
        """Answers bytes that are not a request, unless an answer is on its way already, and ends the connection."""
        self._refused = True
        self._expect(None)
        body = self._refuse(error, self.client)
        running = self._running
        earlier = running is not None and running is not self.cycle and not running.response_complete
        if not earlier and (
            self.cycle is None
            or self.cycle.response_complete
            or (self.cycle.more_body and not self.cycle.response_started)
        ):
            fields = [*self.server_state.default_headers, (b"content-type", b"application/json")]
            fields += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            head = b"".join(b"%b: %b\r\n" % field for field in fields)
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self._abort_requests()
        end_connection(self.transport, self.loop)

    def _expect(self, seconds: float | None) -> None:
        """Sets the time in which the rest of a request must arrive. None: no request is being received."""
        if self._receiving is not None:
            self._receiving.cancel()
        self._receiving = None if seconds is None else self.loop.call_later(seconds, self._too_slow, seconds)

    def _too_slow(self, seconds: float) -> None:
        # Nothing is read while a pipelined request waits for the previous answer.
        previous = self.pipeline or (self._header_bytes and self.cycle and not self.cycle.response_complete)
        if previous:
            self._expect(seconds)
        else:
            self.transport.abort()


class UnreadTimer:
    """Closes the connection of a client that does not read what was written."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is how long the client may leave the socket's buffer full."""
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Call when the buffer is full, or when the connection is to close once it is empty."""
        self.stop()
        self._timer = loop.call_later(self._seconds, transport.abort)

    def stop(self) -> None:
        """The client reads again, or has gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def end_connection(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> asyncio.TimerHandle | None:
    """Ends a connection after what was written. Returns the timer that closes it.

    To close it at once would reset it if the client still sends, and the client would lose the answer.
    """
    if not transport.can_write_eof():  # in TLS
        return loop.call_later(LINGER_SECONDS, transport.close)
    try:
        transport.write_eof()
    except OSError:  # the client has gone
        transport.abort()
        return None
    return loop.call_later(LINGER_SECONDS, transport.abort)


class _LingeringTransport:
    """A transport as an answer uses it, with another `close`. The head is written with the body if the head has its
    length: one packet for the client, not two."""

    __slots__ = ("_close", "_head", "_transport", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None], *, has_body: bool) -> None:
        self._transport, self._close, self.is_closing = transport, close, transport.is_closing
        self._head = b""
        self.write: Callable[[bytes], None] = self._write_head if has_body else transport.write

    def _write_head(self, data: bytes) -> None:
        if b"\r\ncontent-length: " in data:
            self._head, self.write = data, self._write_begin
            return
        self._transport.write(data)
        self.write = self._write_head if data.startswith(_CONTINUE) else self._transport.write

    def _write_begin(self, data: bytes) -> None:
        head, self._head, self.write = self._head, b"", self._transport.write
        self._transport.writelines((head, data))

    def close(self) -> None:
        if self._head:
            self._transport.write(self._head)
        self._close()


class _UnchunkedTransport(_LingeringTransport):
    """The same for a client of HTTP/1.0, which has no chunked coding (RFC 9112, section 6.1). uvicorn uses it all the
    same: it is taken out here, and the connection's end is the answer's end."""

    __slots__ = ("_chunked",)

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None], *, has_body: bool) -> None:
        super().__init__(transport, close, has_body=has_body)
        self._chunked: bool | None = None  # None: the head of the answer was not written
        self.write = self._write_plain

    def _write_plain(self, data: bytes) -> None:
        if self._chunked is None and not data.startswith(_CONTINUE):
            head = data.replace(_CHUNKED, b"", 1)
            self._chunked = len(head) < len(data)
            self._transport.write(head)
        else:
            self._transport.write(_without_sizes(data) if self._chunked else data)


def _without_sizes(chunks: bytes) -> bytes:
    """The content of whole chunks."""
    parts = []
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        count = int(size, 16)
        parts.append(rest[:count])
        chunks = rest[count + 2 :]
    return b"".join(parts)


def _check_authority(url: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Raises APIError 400 if a request names two hosts, since a proxy in front may have checked the other one."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise invalid(f"the request has {len(hosts)} Host headers; send one", code="invalid_http")
    if url[:1] == b"/" or url == b"*":
        return
    parsed = httptools.parse_url(url)
    named = parsed.host or b""
    if parsed.port is not None:
        named += b":%d" % parsed.port
    host = hosts[0].strip().lower() if hosts else b""
    if host and host.replace(b"[", b"").replace(b"]", b"") != named.lower():
        raise invalid("the target of the request and its Host header name different hosts", code="invalid_http")


def _explain(error: httptools.HttpParserError, data: bytes) -> str:
    if data.startswith(TLS_HANDSHAKE):
        return (
            "the client speaks TLS, but this server only HTTP: use http:// and not https://, or set --tls-certificate"
        )
    if data.startswith(HTTP2_PREFACE):
        return "the client speaks HTTP/2, but this server only HTTP/1.1"
    if not isinstance(error, httptools.HttpParserCallbackError):
        return f"this is not a valid HTTP request: {str(error).rstrip('.').lower() or 'it cannot be parsed'}"
    if not isinstance(error.__context__, (httptools.HttpParserInvalidURLError, UnicodeError, AttributeError)):
        _log.error("a request could not be received", exc_info=error)
    return "the target of the request is not a path in ASCII: percent-encode other characters"
