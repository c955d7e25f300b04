"""Frames to and from another process, on this process's event loop."""

import asyncio
import socket
from collections.abc import Callable

from penstock.engine.link.frames import Frames

FRAMES_AT_ONCE = 16  # read before other callbacks of the event loop run


class Connection:
    """One end of a socket pair. Nothing blocks."""

    def __init__(
        self,
        end: socket.socket,
        take: Callable[[bytes], None],
        closed: Callable[[], None] = lambda: None,
        drained: Callable[[], None] = lambda: None,
    ) -> None:
        """`take` gets each frame. `closed` is called when the other end has closed and all frames are taken, `drained`
        when frames that the socket did not take at once have left."""
        self._frames = Frames(end)
        self._take, self._closed, self._drained = take, closed, drained
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(self._frames.fileno(), self._read)

    @property
    def behind(self) -> bool:
        """True while frames wait for room in the socket."""
        return self._frames.unsent

    def send(self, frame: bytes) -> None:
        """Send, or buffer what the socket does not take. Frames go nowhere once the connection is closed."""
        if not self._open:
            return
        self._frames.send(frame)
        if self._frames.unsent:
            self._loop.add_writer(self._frames.fileno(), self._write)

    def read_rest(self) -> None:
        """Take all frames that have arrived."""
        while self._open and self._receive():
            pass

    def close(self) -> None:
        """Take and send nothing more, and close the socket. May be called twice."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._frames.fileno())
            self._loop.remove_writer(self._frames.fileno())
            self._frames.close()

    def _write(self) -> None:
        if self._frames.flush():
            self._loop.remove_writer(self._frames.fileno())
            self._drained()

    def _read(self) -> None:
        if self._open and self._receive():
            self._loop.call_soon(self._read)  # more may be in the buffer, which makes nothing readable

    def _receive(self) -> bool:
        """Take a bounded number of frames. Returns True when there were as many."""
        try:
            frames = self._frames.receive(FRAMES_AT_ONCE)
        except EOFError:
            self._loop.remove_reader(self._frames.fileno())
            self._closed()
            return False
        for frame in frames:
            if self._open:
                self._take(frame)
        return len(frames) == FRAMES_AT_ONCE
