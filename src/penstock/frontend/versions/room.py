"""The room that a server has for engines: who gets it, and who makes way."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from typing import Protocol

from penstock.frontend.errors import APIError

LOOK_SECONDS = 0.05  # between looks whether a model can make way


def no_room(name: str | None, room: "EngineRoom") -> APIError:
    """Returns the error of a request whose model gets no room in time."""
    seconds = max(1, math.ceil(room.wait_seconds()))
    which = "the model" if name is None else f"model {name[:100]!r}"
    message = (
        f"{which} has no engine, and the server has room for no other one (--max-loaded): the next model can make way "
        f"in {seconds} s; send the request again then, or with a longer timeout"
    )
    return APIError(503, message, code="no_room", retry_after=seconds)


class Resident(Protocol):
    """A model whose engine may be ended until the next request."""

    @property
    def has_engine(self) -> bool:
        """False while its engine is asleep, or has ended for good."""

    @property
    def unused_since(self) -> float | None:
        """When its last request ended, on time.monotonic(); None while it has requests or its engine is not ready."""

    async def sleep(self) -> None:
        """Ends the engine until the next request. Raises APIError 409 if that cannot be done now."""


class EngineRoom:
    """At most `most` models have an engine at a time. The one that was used least recently makes way for another.

    A model stays for `stay` seconds at least, so that models which are used in turn do not push each other out with
    every request. Those that wait get room in the order in which they came.
    """

    def __init__(self, most: int | None, stay: float) -> None:
        """`most` is None for a server with room for all."""
        self._most = math.inf if most is None else most
        self._stay = stay
        self._residents: dict[str, Resident] = {}  # all that were started, by name
        self._since: dict[str, float] = {}  # when each got its engine, on time.monotonic()
        self._starting: set[str] = set()
        self._waiting = 0
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def starting(self, name: str) -> AsyncIterator[None]:
        """Waits for room, and ends other engines for it. The caller starts the engine within the block, and `add` must
        have been called at its end."""
        self._waiting += 1
        try:
            async with self._turn:
                await self._make_room(name)
                self._starting.add(name)
        finally:
            self._waiting -= 1
        try:
            yield
            self._since[name] = time.monotonic()
        finally:
            self._starting.discard(name)

    def add(self, name: str, resident: Resident) -> None:
        self._residents[name] = resident

    def remove(self, name: str) -> None:
        self._residents.pop(name, None)

    @property
    def names(self) -> AbstractSet[str]:
        """Those that were added and not removed."""
        return self._residents.keys()

    def wait_seconds(self) -> float:
        """Returns how long a model that comes now waits for room at least."""
        awake = self._awake()
        place = self._waiting + len(awake) - self._most
        if place < 0 or not awake:
            return 0.0
        left = sorted(self._stays_for(name) for name in awake)
        return left[min(int(place), len(left) - 1)]

    async def _make_room(self, name: str) -> None:
        while len(self._awake() - {name}) >= self._most:
            if (resident := self._least_recently_used()) is not None:
                with contextlib.suppress(APIError):  # a request has come, or a reload
                    await resident.sleep()
                    continue
            await asyncio.sleep(LOOK_SECONDS)

    def _awake(self) -> set[str]:
        return self._starting | {name for name, resident in self._residents.items() if resident.has_engine}

    def _stays_for(self, name: str) -> float:
        """Returns the seconds that a model stays in any case."""
        if name in self._starting:
            return self._stay
        return max(self._since[name] + self._stay - time.monotonic(), 0.0)

    def _least_recently_used(self) -> Resident | None:
        """Returns the model that makes way next; None if none can now."""
        unused = [
            (since, resident)
            for name in self._awake() - self._starting
            if (since := (resident := self._residents[name]).unused_since) is not None and not self._stays_for(name)
        ]
        return min(unused, key=lambda each: each[0], default=(0.0, None))[1]
