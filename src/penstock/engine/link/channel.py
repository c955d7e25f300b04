"""The engine's end of the link to its client."""

from collections.abc import Callable
from typing import Protocol

from penstock.engine.link.wire import Command, Ended, Ready, Refused, Step

COMMANDS_AT_ONCE = 256  # that one `receive` returns at most


class Channel(Protocol):
    """Commands in, steps out. Used by the engine's one thread."""

    def receive(self, *, wait: float) -> list[Command | Refused]:
        """Return a bounded number of commands, oldest first. Blocks up to `wait` seconds while there is none, and not
        at all if `wait` is zero or negative.

        A Refused among them is the answer to a command that could not be decoded.
        """

    def post(self, step: Step) -> None:
        """Send a step, or merge it with the steps that the client has not read yet. Never blocks."""

    def announce(self, event: Ready | Ended) -> None:
        """Send that the engine is ready, or that it ends, after all that was posted."""

    def waker(self) -> Callable[[], None]:
        """Return a function for other threads, which lets a `receive` that blocks return."""
