"""Writes to standard error without ever blocking: it may be a pipe that no process reads."""

import contextlib
import logging
import os
import select
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable

STDERR = 2
_KEPT_BYTES = 1 << 20  # of lines that could not be written yet; more are dropped
_PIECE = select.PIPE_BUF  # bytes that a pipe takes whole if it takes any
_PATIENCE = 1.0  # seconds at the end of the process, for a reader that is only slow


class StderrHandler(logging.Handler):
    """Writes log lines to standard error. If it is full, lines are kept for a while, then dropped and counted.

    One line says how many were dropped, as soon as there is room.
    """

    def __init__(self, descriptor: int = STDERR) -> None:
        super().__init__()
        self.dropped = 0
        self._said = 0  # of the dropped lines, those that a line has been written about
        self._descriptor = descriptor
        self._write = _non_blocking(descriptor)
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._writer: threading.Thread | None = None  # runs while lines are kept

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        if not self._kept:
            line = self._put(line)
        if not line:
            return
        if self._kept_bytes + len(line) > _KEPT_BYTES:
            self.dropped += 1
        else:
            self._kept.append(line)
            self._kept_bytes += len(line)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_kept, name="stderr", daemon=True)
            self._writer.start()

    def close(self) -> None:
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            writer.join(_PATIENCE)
        super().close()

    def _put(self, line: bytes) -> bytes:
        """Writes as much of a line as there is room for. Returns the rest."""
        while line:
            try:
                line = line[self._write(line[:_PIECE]) :]
            except BlockingIOError:
                break
            except OSError:  # the reader has closed its end
                self.dropped += 1
                self._said += 1
                return b""
        return line

    def _write_kept(self) -> None:
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        while True:
            ready.poll()
            with self.lock or contextlib.nullcontext():
                while self._kept:
                    line = self._kept[0]
                    rest = self._put(line)
                    self._kept_bytes -= len(line) - len(rest)
                    if rest:
                        self._kept[0] = rest
                        break
                    self._kept.popleft()
                if self._kept:
                    continue
                self._writer = None
                lost, self._said = self.dropped - self._said, self.dropped
            if lost:
                logging.getLogger("penstock.log").warning("%d log lines were dropped: standard error was full", lost)
            return


def complain(text: str) -> None:
    """Writes a line to standard error, unless there is no room for it within a second."""
    write, rest = _non_blocking(STDERR), f"{text}\n".encode("utf-8", "backslashreplace")
    ready = select.poll()
    ready.register(STDERR, select.POLLOUT)
    with contextlib.suppress(OSError):
        while rest and ready.poll(_PATIENCE * 1000):
            rest = rest[write(rest[:_PIECE]) :]


def _non_blocking(descriptor: int) -> Callable[[bytes], int]:
    """Returns a function that writes bytes and returns their number, or raises BlockingIOError.

    The descriptor's own flag stays as it is: other processes, such as the shell, have the same open file.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        sock = socket.socket(fileno=os.dup(descriptor))
        return lambda data: sock.send(data, socket.MSG_DONTWAIT)
    if stat.S_ISREG(mode):
        return lambda data: os.write(descriptor, data)
    if stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return lambda data: os.write(own, data)
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)

    def write(data: bytes) -> int:
        if not ready.poll(0):
            raise BlockingIOError
        return os.write(descriptor, data)

    return write
