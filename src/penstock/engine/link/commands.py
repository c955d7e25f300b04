"""Reads a client's commands, and converts the times in them to this process's clock."""

import math

import msgspec

from penstock.engine.link.wire import Add, Command, Refused, decode_command
from penstock.messages import Clock

WINDOW = 60.0  # seconds that a measured clock difference stays valid: clocks drift, and one of them may stop


class CommandReader:
    """Decodes the commands of one client, and converts the times of requests to this process's clock.

    The clocks may differ by any number of seconds, because each machine counts from its own start. Every request has
    the time at which it was sent. Time of receipt - time of sending = clock difference + transit time. The transit time
    can be long, since an engine reads commands only between steps. So the smallest such value of the last one to two
    minutes is taken as the clock difference. On one machine its error is less than a millisecond.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._least = self._least_before = math.inf  # smallest value in this window, and in the one before it
        self._window_ends = -math.inf

    def read(self, frame: bytes) -> Command | Refused | None:
        """Return the command in a frame. For one with a value of a wrong type, return the answer that refuses it. For
        any other frame, log it and return None."""
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
