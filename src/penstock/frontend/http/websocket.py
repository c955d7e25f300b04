"""The WebSocket connection: uvicorn's protocol with more limits. Imported at the first handshake.

uvicorn does not limit how long a client leaves messages unread, how long a message takes, nor the memory of messages
that have arrived in part, of frames, and of the answers to pings that a client does not read.
"""

import asyncio
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from penstock.frontend.errors import APIError
from penstock.frontend.http.buffers import ByteBudget
from penstock.frontend.http.connection import LINGER_SECONDS, UnreadTimer, end_connection
from penstock.frontend.limits import RequestLimits

# https://www.iana.org/assignments/websocket
_POLICY_VIOLATION, _TOO_BIG, _TRY_AGAIN_LATER = 1008, 1009, 1013
MOST_FRAMES = 4096  # of a message: Python needs 100 bytes for each, even if it holds one byte of the message
_PIECE = 8 << 10  # bytes that are parsed at once, as they may be 1,365 frames


class BoundedSocket(WebSocketsSansIOProtocol):
    """Closes the connection of a client that does not read, and that of one whose message exceeds a limit."""

    def __init__(self, limits: RequestLimits, bodies: ByteBudget, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._held = bodies.hold()  # bytes of the message that is arriving
        self._unread = UnreadTimer(limits.write_timeout)
        self._failed = False  # a close frame was sent because of an error; what still arrives is dropped
        self._rest = b""  # received and not parsed yet
        self._parsing: asyncio.Handle | None = None  # the next call of _parse
        self._seconds = limits.body_timeout
        self._incomplete: asyncio.TimerHandle | None = None  # runs while a message has arrived in part

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_input()
        self._unread.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._failed:
            return
        try:
            self._held.add(len(data))
        except APIError as error:
            self._fail(_TRY_AGAIN_LATER, error.message[:120])
            return
        self._rest += data
        if self._parsing is None:
            self._parse()

    def _parse(self) -> None:
        """Parses a piece of what was received, and then lets the event loop do other work. While messages wait for the
        app, or the client does not read what the server sends, such as answers to its pings, nothing is read."""
        self._parsing = None
        if self.read_paused or not self.writable.is_set():
            self.transport.pause_reading()
            return
        piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
        super().data_received(piece)
        if self._failed:
            return
        if len(self.frames) > MOST_FRAMES:
            self._fail(_TOO_BIG, f"the message has more than {MOST_FRAMES} frames, the limit")
            return
        if not self._rest:
            self._time_message(bool(self.frames or self.conn.reader.buffer))
        self._go_on()

    def send_receive_event_to_app(self) -> None:
        self._stop_timer()  # the next message has its own time, and counts anew
        self._held.release()
        super().send_receive_event_to_app()

    def _go_on(self) -> None:
        """Parses the next piece soon, or reads on if there is none."""
        if self._failed:
            return
        if self._rest:
            self.transport.pause_reading()  # uvicorn resumes it when the app has taken all messages
            if self._parsing is None and not self.read_paused:
                self._parsing = self.loop.call_soon(self._parse)
        elif not self.read_paused:
            self.transport.resume_reading()

    def _time_message(self, incomplete: bool) -> None:
        """Limits the time for the rest of a message, as its bytes count among those of bodies."""
        if not incomplete:
            self._held.release()
            self._stop_timer()
        elif self._incomplete is None:
            self._incomplete = self.loop.call_later(self._seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._incomplete = None
        if self.read_paused or self._rest:  # the client may not be the one that is slow
            self._time_message(True)
        elif not self._failed:
            self._fail(_POLICY_VIOLATION, f"the message did not arrive within {self._seconds:g} s")

    def _stop_timer(self) -> None:
        if self._incomplete is not None:
            self._incomplete.cancel()
            self._incomplete = None

    def _end_input(self) -> None:
        """Forgets what was received and not passed to the app."""
        self._rest = b""
        self._held.release()
        self._stop_timer()
        if self._parsing is not None:
            self._parsing.cancel()
            self._parsing = None

    def _fail(self, code: int, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    async def receive(self) -> Any:
        message = await super().receive()
        self._go_on()
        return message

    def handle_parser_exception(self) -> None:
        """Ends the connection after an error. To close it at once would reset it if the client still sends, which would
        then lose the close frame."""
        self._failed = True
        self._end_input()
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
        """Returns when the client has read most of the message: until then its sender counts the bytes. Raises
        ClientDisconnected after the server has closed the socket, as when the client answered no ping."""
        await self.writable.wait()
        if self.close_sent and message["type"] == "websocket.send":
            raise ClientDisconnected
        await super().send(message)
        self._go_on()  # after a close frame, messages are no longer kept for the app
        await self.writable.wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start(self.transport, self.loop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.stop()
        self._go_on()
