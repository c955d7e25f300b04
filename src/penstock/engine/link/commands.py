"""Reads the commands of a client whose clock may be another one than this process's."""

import math

import msgspec

from penstock.engine.link.wire import Add, Command, Refused, decode_command
from penstock.messages import Clock

WINDOW = 60.0  # seconds after which a difference of the clocks is measured anew: they drift, and may be stopped


class CommandReader:
    """Decodes the commands of one client, and gives requests their times on this process's clock.

    The clocks may differ by any number of seconds: each machine counts from its own start. Every request says when it
    was sent. The time of its receipt minus that is the difference of the clocks plus the time on the way. This may be
    long, as an engine reads commands only between steps, so the smallest value of the last requests is taken. On one
    machine it is less than a millisecond.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._least = self._least_before = math.inf  # in this window, and in the one before it
        self._window_ends = -math.inf

    def read(self, frame: bytes) -> Command | Refused | None:
        """Return a command, or the answer to one with a value of a wrong type. Logs anything else, and returns None."""
        command = decode_command(frame)
        if not isinstance(command, Add):
            return command
        return msgspec.structs.replace(command, request=command.request.on_clock(self._ahead(command.sent)))

    def _ahead(self, sent: float) -> float:
        """Return by how many seconds this clock is ahead of the client's."""
        now = self._clock()
        if now >= self._window_ends:
            self._least_before = self._least if now < self._window_ends + WINDOW else math.inf
            self._least, self._window_ends = math.inf, now + WINDOW
        self._least = min(self._least, now - sent)
        return min(self._least, self._least_before)
