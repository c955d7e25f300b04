"""What a kind of models needs to be in a repository."""

from typing import Protocol, TypeVar

from penstock.repository.entry import Target

M = TypeVar("M", bound="ReadyModel")


class UsedModel(Protocol):
    """The requests of a version."""

    @property
    def requests(self) -> int:
        """The number in flight."""
        ...

    async def unused(self) -> None:
        """Returns when none is in flight."""
        ...


class ReadyModel(Protocol):
    """A version that is ready, of any kind."""

    @property
    def note(self) -> str:
        """What the operator should know; "": nothing."""
        ...

    @property
    def usage(self) -> UsedModel: ...


class Loader(Protocol[M]):
    """Loads the versions of one kind of models."""

    async def load(self, target: Target) -> M:
        """Returns a version that is ready. Raises LoadFailed, or another exception whose message says why."""
        ...

    def withdraw(self, model: M) -> None:
        """Takes a version away from new requests."""
        ...

    async def unload(self, model: M) -> None:
        """Ends a version whose last request has ended."""
        ...

    async def close(self) -> None:
        """Ends everything that it has started."""
        ...
