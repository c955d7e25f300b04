"""The engine's end of the link to its client."""

from typing import Protocol

from penstock.engine.wire import Command, Rejected, Step

COMMANDS_AT_ONCE = 256  # that one `receive` takes at most


class Port(Protocol):
    """Commands in, steps out. Used by the engine's one thread; `post` never waits for the client."""

    def receive(self, *, wait: float) -> list[Command | Rejected]:
        """Commands that have come, oldest first, a bounded number of them. Sleeps for some, `wait` seconds at most.

        A Rejected among them answers a request that could not be read.
        """
        ...

    def post(self, step: Step) -> None:
        """Send, or merge with what the client has not taken yet."""
        ...
