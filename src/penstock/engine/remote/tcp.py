"""Frames over TCP or TLS, on an event loop: a length of four bytes, then so many bytes.

Both ends send an empty frame when they have sent nothing else for a while. An end that receives nothing for
SILENCE_SECONDS closes the connection: the other machine, its process or the network between them has stopped.
A front sends pings, which the other end answers with echoes: frames of one byte.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

from penstock.messages import EngineError

BEAT_SECONDS = 0.5  # between looks whether anything was sent and received
SILENCE_SECONDS = 3.0
FIRST_FRAME_BYTES = 4096  # largest frame before the other end has proved that it has the key
FRAME_BYTES = 256 << 20  # largest frame after that
LINGER_SECONDS = 5.0  # for the last frames to leave
UNREAD_BYTES = 1 << 20  # in the socket's buffer, beyond which steps are merged
_ROUND_TRIPS = 8  # of which the shortest counts: the others waited for an event loop
_PING, _ECHO = b"?", b"!"
_LENGTH = struct.Struct("<I")


class TcpConnection(asyncio.Protocol):
    """One end of a connection. Before `attach`, frames are read with `frame`; each must be small."""

    def __init__(
        self, most: int = FIRST_FRAME_BYTES, made: Callable[["TcpConnection"], None] = lambda connection: None
    ) -> None:
        """`most` is the size of the largest frame before `attach`, and of all that wait for `frame` together. `made` is
        called when frames can be sent."""
        self._made = made
        self.lost = ""  # why the connection is closed
        self.behind = False  # True while frames wait for room in the socket
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._most = most
        self._early: list[bytes] = []  # frames that came before `attach`
        self._next: asyncio.Future[None] | None = None  # while `frame` blocks
        self._take: Callable[[bytes], None] = self._keep
        self._closed: Callable[[], None] = self._wake
        self._drained: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._beat: asyncio.TimerHandle | None = None
        self._heard = self._sent = True  # since the last beat
        self._silent = 0  # beats without anything received
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)  # seconds
        self._pinged: float | None = None  # when the ping was sent whose echo has not come

    # -- use ------------------------------------------------------------------------------------------------------

    @property
    def round_trip(self) -> float:
        """Seconds until the other end's answer, as measured in the last seconds."""
        return min(self._round_trips, default=0.0)

    def measure(self, seconds: float) -> None:
        """Measure the round trip from now on, of which the first took so long."""
        self._round_trips.append(seconds)

    async def frame(self) -> bytes:
        """Return the next frame. Raises EngineError if the connection is lost. The caller bounds the time."""
        while not self._early:
            if self.lost:
                raise EngineError(self.lost)
            self._next = self._loop.create_future()
            await self._next
        return self._early.pop(0)

    def attach(
        self, take: Callable[[bytes], None], closed: Callable[[], None], drained: Callable[[], None]
    ) -> "TcpConnection":
        """Let `take` get each frame, those that have come already soon after this call. `closed` is called once when
        the connection is lost, and `drained` when frames that the socket did not take at once have left."""

        def begin() -> None:
            early, self._early = self._early, []
            self._take = take
            for frame in early:
                take(frame)
            if self.lost:
                closed()
            else:
                self._closed = closed

        self._most, self._drained = FRAME_BYTES, drained
        self._loop.call_soon(begin)
        return self

    def send(self, frame: bytes) -> None:
        """Send, or buffer what the socket does not take. Frames go nowhere once the connection is closed."""
        if self._transport is not None and not self.lost:
            self._sent = True
            self._transport.write(_LENGTH.pack(len(frame)) + frame)

    def close(self, reason: str = "the connection is closed") -> None:
        """Take nothing more, and close once what was sent has left. May be called twice."""
        self._end(reason)
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(LINGER_SECONDS, self._transport.abort)  # if the other end does not read

    def abort(self, reason: str) -> None:
        """Close at once, as lost."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=UNREAD_BYTES)
        self._beat = self._loop.call_later(BEAT_SECONDS, self._look)
        self._made(self)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        buffer, begin = self._received, 0
        buffer += data
        size = len(buffer)
        while not self.lost and (body := begin + _LENGTH.size) <= size:
            length = _LENGTH.unpack_from(buffer, begin)[0]
            if length > self._most:
                self._failed(f"a frame of {length} bytes is announced, and the limit is {self._most}")
                return
            if body + length > size:
                break
            begin = body + length
            frame = bytes(memoryview(buffer)[body:begin])
            if frame in (_PING, _ECHO):
                self._echo(frame)
            elif frame:
                self._take(frame)
        if begin:
            del buffer[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        self._failed("the connection was lost" if error is None else f"the connection was lost: {error}")

    def pause_writing(self) -> None:
        self.behind = True

    def resume_writing(self) -> None:
        self.behind = False
        self._drained()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Run once a beat. Beats are counted, so that time in which this process was stopped counts as one."""
        self._silent = 0 if self._heard else self._silent + 1
        if self._silent * BEAT_SECONDS >= SILENCE_SECONDS:
            self._failed(f"nothing was received for {SILENCE_SECONDS:g} s")
            return
        now = self._loop.time()
        if self._round_trips and (self._pinged is None or now - self._pinged > SILENCE_SECONDS):  # the echo was dropped
            self._pinged = now
            self.send(_PING)
        elif not self._sent:
            self.send(b"")
        self._heard = self._sent = False
        self._beat = self._loop.call_later(BEAT_SECONDS, self._look)

    def _echo(self, frame: bytes) -> None:
        if frame == _PING and not self.behind:  # else an end that reads nothing could fill the memory
            self.send(_ECHO)
        elif frame == _ECHO and self._pinged is not None:
            self._round_trips.append(self._loop.time() - self._pinged)
            self._pinged = None

    def _failed(self, reason: str) -> None:
        if not self.lost:
            closed = self._closed
            self.abort(reason)
            closed()

    def _end(self, reason: str) -> None:
        self.lost = self.lost or reason
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        self._closed = lambda: None
        self._wake()

    def _keep(self, frame: bytes) -> None:
        self._early.append(frame)
        if sum(map(len, self._early)) > self._most:
            self._failed(f"more than {self._most} bytes came before they were expected")
        self._wake()

    def _wake(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
