"""The models of the machine, as a server may list and change them for its clients."""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class StoredModel(NamedTuple):
    name: str  # as commands take it
    size: int  # bytes
    modified: float  # seconds since the epoch
    revision: str  # commit; empty if it has none


class ModelStore(Protocol):
    """Its functions may take long, and are called on threads."""

    def models(self) -> list[StoredModel]:
        """The models that can be used."""

    def pull(self, name: str, watch: Callable[[int, int], None]) -> None:
        """Downloads a model, or what is new in it. Calls `watch` with the bytes done and in total several times a
        second; what `watch` raises ends the download. Raises ValueError with the reason."""

    def remove(self, name: str) -> None:
        """Removes a model. Raises ValueError with the reason."""
