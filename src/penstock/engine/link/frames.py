"""Frames between two processes over a stream socket: a length of four bytes, then so many bytes.

There is no messaging thread on either side: it would have to be scheduled for each message, and delay a step on
processors that all compute.
"""

import socket
import struct

READ_BYTES = 256 << 10
_LENGTH = struct.Struct("<I")


class Frames:
    """One end of the socket. Nothing blocks; one thread calls."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """True when the socket's buffer was full and bytes are left for `flush`."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> bool:
        """Returns True when nothing is left to `flush`. Raises struct.error from 4 GiB on. If the other end is closed,
        frames are dropped, and `receive` reports it."""
        data = _LENGTH.pack(len(frame)) + frame
        if self._unsent:
            self._unsent += data
            return self.flush()
        sent = self._give(data)
        if sent < len(data):
            self._unsent += data[sent:]
        return sent == len(data)

    def flush(self) -> bool:
        """Send what the socket has not taken yet. Returns True when nothing is left."""
        if self._unsent:
            del self._unsent[: self._give(self._unsent)]
        return not self._unsent

    def receive(self, most: int) -> list[bytes]:
        """Return up to `most` frames received. Raises EOFError when the other end is closed and all was received."""
        frames = self._complete(most) if self._received else []
        while len(frames) < most:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                if frames:
                    break
                raise EOFError("the other end is closed")
            if not self._received and int.from_bytes(data[:4], "little") == len(data) - 4:
                frames.append(data[4:])  # one whole frame, as nearly always
            else:
                self._received += data
                frames += self._complete(most - len(frames))
            if frames and len(data) < READ_BYTES:  # the socket's buffer is empty
                break
        return frames

    def close(self) -> None:
        """Close the socket. The bytes it has taken still arrive."""
        self._socket.close()

    def _give(self, data: bytes | bytearray) -> int:
        """Return the number of bytes sent, or lost because the other end is closed."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(data)

    def _complete(self, most: int) -> list[bytes]:
        """Take up to `most` complete frames from the buffer."""
        frames: list[bytes] = []
        buffer, begin = self._received, 0
        size = len(buffer)
        while len(frames) < most and (body := begin + _LENGTH.size) <= size:
            end = body + _LENGTH.unpack_from(buffer, begin)[0]
            if end > size:
                break
            frames.append(bytes(buffer[body:end]))
            begin = end
        if begin:
            del buffer[:begin]
        return frames
