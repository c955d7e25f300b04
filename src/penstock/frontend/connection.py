"""The HTTP connection: uvicorn's httptools protocol with more limits.

uvicorn does not limit how long a client takes to send a request, how large the headers are, or how long the client
leaves its answer unread. Each of these would let a client hold a connection, and its request in the engine, forever.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.frontend.limits import RequestLimits

# Written directly to the connection: the app has no request to answer yet.
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Closes the connection of a client that sends its request too slowly or does not read its answer."""

    def __init__(self, limits: RequestLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._receiving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._header_bytes = 0  # received of a request whose headers are not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._stop_unread()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > self._limits.max_header_bytes and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect(self._limits.header_timeout)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # The app answers 408 after body_timeout. This later limit is for bodies that the app has refused already.
        self._expect(self._limits.body_timeout + self._limits.header_timeout)
        self._header_bytes = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._header_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect(None)
        self._header_bytes = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

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

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
