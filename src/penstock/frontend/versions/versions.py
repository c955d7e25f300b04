"""The current version of a model, and the version before it while requests still use that one."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from penstock.frontend.versions.series import Model, Series
from penstock.messages import EngineInfo

_log = logging.getLogger("penstock.serving")


class UsedVersion(Protocol):
    """A version of a model, and the number of requests that use it."""

    @property
    def model(self) -> Model: ...
    @property
    def series(self) -> Series: ...
    @property
    def requests(self) -> int: ...

    async def unused(self) -> None: ...

    async def close(self) -> None:
        """Ends its engine. Requests that still use it end with EngineError. May be called twice."""


V = TypeVar("V", bound=UsedVersion)


class Versions(Generic[V]):
    """The current version, which new requests get, and the one before it, which ends with its last request."""

    def __init__(self, first: V) -> None:
        self.current = first
        self.before: V | None = None  # None if it has ended
        self.on_exchange: Callable[[EngineInfo], None] = lambda info: None  # called with the new engine's facts
        self._retiring: asyncio.Task[None] | None = None

    @property
    def in_use(self) -> list[V]:
        """The versions whose engines run, the newest first."""
        return [self.current] if self.before is None else [self.current, self.before]

    @property
    def retiring(self) -> int | None:
        """The number of requests that still use the version before; None if it has ended."""
        return None if self.before is None else self.before.requests

    @property
    def series(self) -> list[Series]:
        """The series of the versions in use: one, or two if they have different names."""
        return list(dict.fromkeys(version.series for version in self.in_use))

    def exchange(self, new: V) -> None:
        """Makes `new` the current version. `before` must be None."""
        old = self.current
        self.current, self.before = new, old
        self._retiring = asyncio.create_task(self._retire(old))
        self.on_exchange(new.model.client.info)

    async def close(self) -> None:
        """Ends all engines. May be called twice."""
        for version in reversed(self.in_use):
            await version.close()
        if self._retiring is not None:
            self._retiring.cancel()
            await asyncio.gather(self._retiring, return_exceptions=True)

    async def _retire(self, old: V) -> None:
        """Ends a version when its last request has ended."""
        began, model = time.monotonic(), old.model
        await old.unused()
        await old.close()
        old.series.ended(model.client, self.current.series)
        if self.before is old:
            self.before = None
        _log.info("%s %s has ended, after %.1f s", model.name, model.fingerprint, time.monotonic() - began)
