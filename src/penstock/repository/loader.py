"""What a version of any kind of model is to the repository."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.repository.entry import Target
from penstock.repository.rollouts.rollout import ComparedModel


class UsedModel(Protocol):
    """The requests of a version."""

    @property
    def requests(self) -> int:
        """The number in flight."""

    async def unused(self) -> None:
        """Returns when none is in flight."""


class ReadyModel(ComparedModel, Protocol):
    """A version that is ready."""

    @property
    def note(self) -> str:
        """What the operator should know; "": nothing."""

    @property
    def usage(self) -> UsedModel: ...

    def withdraw(self) -> None:
        """Takes the version away from new requests, if these do not find it by the repository."""

    async def close(self) -> None:
        """Frees what it has. Called after its last request."""


# Returns a version that is ready. Raises LoadFailed, or another exception whose message says why.
Load = Callable[[Target], Awaitable[ReadyModel]]
