"""Several connections over one socket: a frame begins with the number of its channel."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from penstock.engine.link.connection import Connection

_NUMBER_BYTES = 4


class MuxChannel:
    """One of the connections. Both ends open it with the same number; frames of one that is not open are lost."""

    def __init__(
        self,
        mux: "Mux",
        number: int,
        take: Callable[[bytes], None],
        closed: Callable[[], None],
        drained: Callable[[], None],
    ) -> None:
        self.take, self.closed, self.drained = take, closed, drained
        self._mux, self._number = mux, number
        self._prefix = number.to_bytes(_NUMBER_BYTES, "little")
        self.open = True

    @property
    def behind(self) -> bool:
        """True while frames of any channel wait for room in the socket."""
        return self._mux.behind

    def send(self, frame: bytes) -> None:
        """Send, or buffer what the socket does not take. Frames go nowhere once the channel is closed."""
        if self.open:
            self._mux.send(self._prefix + frame)

    def close(self) -> None:
        """Take and send nothing more. The other end does not see it. May be called twice."""
        if self.open:
            self.open = False
            self._mux.forget(self._number)


class FrameConnection(Protocol):
    """One end of a connection that carries frames."""

    @property
    def behind(self) -> bool: ...
    def send(self, frame: bytes) -> None: ...
    def close(self) -> None: ...


E = TypeVar("E")
# Begins to read an end: the functions get each frame, its loss, and when what waited has left.
Attach = Callable[[E, Callable[[bytes], None], Callable[[], None], Callable[[], None]], FrameConnection]


class Mux:
    """One end of a connection, on this process's event loop."""

    def __init__(self, end: E, attach: Attach[E] = Connection) -> None:  # type: ignore[assignment]
        """`end` is a socket, or what `attach` takes."""
        self._connection = attach(end, self._take, self._lost, self._drained)
        self._channels: dict[int, MuxChannel] = {}

    def open(
        self,
        number: int,
        take: Callable[[bytes], None],
        closed: Callable[[], None] = lambda: None,
        drained: Callable[[], None] = lambda: None,
    ) -> MuxChannel:
        """Return a channel. `take` gets each of its frames. `closed` is called when the other end of the socket has
        closed, `drained` when frames that the socket did not take at once have left."""
        channel = self._channels[number] = MuxChannel(self, number, take, closed, drained)
        return channel

    @property
    def behind(self) -> bool:
        return self._connection.behind

    def send(self, frame: bytes) -> None:
        self._connection.send(frame)

    def forget(self, number: int) -> None:
        del self._channels[number]

    def close(self) -> None:
        """Close the socket. May be called twice."""
        self._connection.close()

    def _take(self, frame: bytes) -> None:
        channel = self._channels.get(int.from_bytes(frame[:_NUMBER_BYTES], "little"))
        if channel is not None:
            channel.take(frame[_NUMBER_BYTES:])

    def _lost(self) -> None:
        for channel in list(self._channels.values()):
            channel.closed()

    def _drained(self) -> None:
        for channel in list(self._channels.values()):
            channel.drained()
