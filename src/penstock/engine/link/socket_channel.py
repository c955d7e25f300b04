"""The engine's end of the socket to a client in another process."""

import math
import os
import select
import socket
import time
from collections.abc import Callable
from functools import partial

from penstock.engine.link.channel import COMMANDS_AT_ONCE
from penstock.engine.link.commands import CommandReader
from penstock.engine.link.frames import Frames
from penstock.engine.link.merge import StepBuffer
from penstock.engine.link.wire import Command, Ended, Ready, Refused, Step, Stop, encode
from penstock.messages import Clock

LINGER_SECONDS = 1.0  # for the last message to leave


class SocketChannel:
    """The engine's end of the socket.

    A client that does not read cannot stall the engine: what its socket does not take is merged, one delta for each
    choice, and sent when there is room.
    """

    def __init__(self, end: socket.socket, clock: Clock = time.monotonic) -> None:
        """The times of requests are on `clock`."""
        self._frames = Frames(end)
        self._reader = CommandReader(clock)
        self._late = StepBuffer()
        self._behind = False  # bytes or steps wait for room in the socket
        self._arrivals = select.poll()
        self._arrivals.register(self._frames, select.POLLIN)
        self._waker: int | None = None  # an eventfd that other threads write to; it is open until the process ends
        self._more = False  # more commands may be in the buffer, which makes no descriptor readable

    def receive(self, *, wait: float) -> list[Command | Refused]:
        if wait > 0.0 and not self._more:
            self._sleep(wait)
        if self._behind:
            self._send_late()
        if not (self._more or self._arrivals.poll(0)):  # cheaper than an exception of recv
            return []
        try:
            frames = self._frames.receive(COMMANDS_AT_ONCE)
        except EOFError:
            return [Stop("the client is gone")]
        self._more = len(frames) == COMMANDS_AT_ONCE
        return [command for frame in frames if (command := self._reader.read(frame)) is not None]

    def post(self, step: Step) -> None:
        if self._behind:
            self._late.push(step)
        else:
            self._behind = not self._frames.send(encode(step))

    def announce(self, event: Ready | Ended) -> None:
        """Send an event. Blocks up to LINGER_SECONDS for a client that is behind, and drops the event after that."""
        if self._settle():
            self._behind = not self._frames.send(encode(event))

    def close(self) -> None:
        """Block up to LINGER_SECONDS for the last messages to leave, then close."""
        self._settle()
        self._frames.close()

    def waker(self) -> Callable[[], None]:
        """See Channel."""
        if self._waker is None:
            self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return partial(os.eventfd_write, self._waker, 1)

    def _sleep(self, seconds: float) -> None:
        """Block until there is a command or the time is over. Late messages leave meanwhile when there is room."""
        end = time.monotonic() + seconds
        poll = select.poll()
        if self._waker is not None:
            poll.register(self._waker, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            poll.register(self._frames, select.POLLIN | (select.POLLOUT if self._behind else 0))
            found = poll.poll(math.ceil(left * 1000))
            if self._waker is not None and any(file == self._waker for file, _ in found):
                os.eventfd_read(self._waker)
                return
            if any(events & ~select.POLLOUT for _, events in found):
                return
            self._send_late()

    def _settle(self) -> bool:
        """Block up to LINGER_SECONDS until all is sent. Returns whether it is."""
        end = time.monotonic() + LINGER_SECONDS
        poll = select.poll()
        poll.register(self._frames, select.POLLOUT)
        while not self._send_late():
            left = end - time.monotonic()
            if left <= 0:
                return False
            poll.poll(math.ceil(left * 1000))
        return True

    def _send_late(self) -> bool:
        """Send late messages as far as there is room. Returns True when nothing is left."""
        sent = self._frames.flush()
        if sent and self._late:
            sent = self._frames.send(encode(self._late.take()))
        self._behind = not sent
        return sent
