"""The WebSocket connection: uvicorn's protocol with more limits. Imported at the first handshake.

uvicorn does not limit how long a client leaves messages unread, nor the memory of messages that have arrived in part.
"""

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from penstock.frontend.errors import APIError
from penstock.frontend.http.buffers import ByteBudget
from penstock.frontend.http.connection import LINGER_SECONDS, UnreadTimer, end_connection
from penstock.frontend.limits import RequestLimits

_TRY_AGAIN_LATER = 1013  # https://www.iana.org/assignments/websocket


class BoundedSocket(WebSocketsSansIOProtocol):
    """Closes the connection of a client that does not read, and that of one whose message exceeds a limit."""

    def __init__(self, limits: RequestLimits, bodies: ByteBudget, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._held = bodies.hold()  # bytes of the message that is arriving
        self._unread = UnreadTimer(limits.write_timeout)
        self._failed = False  # a close frame was sent because of an error; what still arrives is dropped

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.release()
        self._unread.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._failed:
            return
        try:
            self._held.add(len(data))
        except APIError as error:
            self.conn.fail(_TRY_AGAIN_LATER, error.message[:120])
            self.handle_parser_exception()
            return
        super().data_received(data)
        if not self.frames and not self.conn.reader.buffer:
            self._held.release()

    def handle_parser_exception(self) -> None:
        """Ends the connection after an error. To close it at once would reset it if the client still sends, which would
        then lose the close frame."""
        self._failed = True
        self._held.release()
        close = self.conn.close_sent
        if close is None:  # not open yet
            self.transport.abort()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.resume_reading()
        self.close_timer = end_connection(self.transport, self.loop)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)  # it may never read what is left to send

    async def send(self, message: Any) -> None:
        """Returns when the client has read most of the message: until then its sender counts the bytes."""
        await super().send(message)
        await self.writable.wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start(self.transport, self.loop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.stop()
