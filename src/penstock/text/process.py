"""A process that does what may take too long, and can be killed: `python -m penstock.text.worker`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from penstock.environment import child_environment

START_SECONDS = 30.0  # for the process to start, on a busy machine
_PART = 1 << 20  # bytes that are read at once
# How a text ends the process: too much processor time, too much memory, too deep a recursion.
_BY_A_TEXT = frozenset((1, -signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS))


class WorkerEnded(RuntimeError):
    """The process was ended by something else than its text, or got too little processor time to answer."""


class WorkerProcess:
    """Answers lines with lines. One caller at a time."""

    def __init__(self, setup: bytes) -> None:
        """Returns when the process is ready. Raises RuntimeError if it does not start; the log has its error."""
        command = [sys.executable, "-m", "penstock.text.worker"]
        self._socket, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            self._process = subprocess.Popen(command, stdin=end, stdout=end, env=child_environment(os.environ))
        self._asked = False
        if not self.ask_blocking(setup, START_SECONDS):
            raise RuntimeError("the process for work on texts did not start; the log has its error")

    @property
    def runs(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def ask_blocking(self, line: bytes, seconds: float) -> bytes:
        """The answer to a line. Empty if the line ended the process. Raises WorkerEnded if something else did, or if no
        answer came in time; the process is killed then."""
        end, answer = time.monotonic() + seconds, bytearray()
        with self._asking(), contextlib.suppress(OSError):  # TimeoutError, or the process has ended
            self._socket.settimeout(seconds)
            self._socket.sendall(line + b"\n")
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(end - time.monotonic(), 0.001))
                answer += _received(self._socket.recv(_PART))
            return bytes(answer)
        self.kill()
        return self._verdict(seconds)

    async def ask(self, line: bytes, seconds: float) -> bytes:
        """As `ask_blocking`, on the event loop. If the caller is cancelled, the process is killed.

        In a thread, `ask_blocking` would block on the interpreter's lock several times, up to 5 ms each time. The loop
        would sleep while the thread has the lock, and another process could take the loop's processor.
        """
        import asyncio  # the engine, which reads texts too, starts without it

        loop, answer = asyncio.get_running_loop(), bytearray()
        try:
            with self._asking(), contextlib.suppress(OSError):
                self._socket.setblocking(False)
                async with asyncio.timeout(seconds):
                    await loop.sock_sendall(self._socket, line + b"\n")
                    while not answer.endswith(b"\n"):
                        answer += _received(await loop.sock_recv(self._socket, _PART))
                    return bytes(answer)
        except asyncio.CancelledError:
            self.kill()
            raise
        await asyncio.to_thread(self.kill)
        return self._verdict(seconds)

    def kill(self) -> None:
        """Ends the process. A call that blocks on an answer gets none."""
        self._process.kill()
        self._process.wait()
        if not self._asked:  # else the call that blocks reads the end of the stream, and calls this again
            self._socket.close()

    def _verdict(self, seconds: float) -> bytes:
        status = self._process.returncode
        if status in _BY_A_TEXT:
            return b""
        if status == -signal.SIGKILL:
            raise WorkerEnded(f"the process for it was killed, or had no answer after {seconds:g} s")
        raise WorkerEnded(f"the process for it ended with status {status}")

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Keeps the socket open while a call uses it."""
        self._asked = True
        try:
            yield
        finally:
            self._asked = False


def _received(part: bytes) -> bytes:
    """Returns what a socket received. Raises OSError at the end of the stream."""
    if not part:
        raise ConnectionResetError
    return part
