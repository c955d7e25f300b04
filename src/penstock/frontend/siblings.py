"""The other API processes of a server that has several (`--api-processes`)."""

from collections.abc import Awaitable
from typing import Protocol


class Siblings(Protocol):
    """The services that one API process needs of the others."""

    @property
    def first(self) -> bool:
        """True in the one process that runs batches."""

    @property
    def fresh(self) -> bool:
        """True if no process has answered requests before this one."""

    @property
    def starting(self) -> bool:
        """True until all processes of a new server answer requests: the others say that the model is loaded."""

    @property
    def storage_lock(self) -> int:
        """The file descriptor of the lock that all of them hold."""

    @property
    def number(self) -> int:
        """Returns the number of this process."""

    def ask(self, message: str) -> Awaitable[str]:
        """Sends the supervisor a message at once, and returns what waits for its reply. That raises EngineError if it
        has ended."""

    def notify(self, message: str) -> None:
        """Sends the supervisor what has no reply of interest."""

    def run_batches(self) -> None:
        """Notifies the first process that a batch is new or changed."""

    async def reload(self, *, drain_first: bool = False) -> str:
        """Reloads the model in all processes, as `Reloads.reload` does in one. Raises APIError."""

    async def metrics(self, accept: str | None) -> tuple[bytes, str]:
        """Returns the exposition of all processes' metrics together, and its content type."""

    async def load(self, model: str) -> bytes:
        """Returns the answer of /server_load for a model, for all processes together."""
