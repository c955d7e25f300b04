"""One model of a server: its current version, its reloads, and the sleep of its engine."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from penstock.frontend.errors import APIError
from penstock.frontend.served import ServedModel
from penstock.frontend.versions.reloads import Prepare, Reloads, busy
from penstock.frontend.versions.series import Series
from penstock.frontend.versions.versions import Versions
from penstock.messages import EngineError, Sleep, Wake
from penstock.observe.metrics import Metrics
from penstock.tasks import InFlight

_log = logging.getLogger("penstock.serving")


class Version(InFlight):
    """A loaded model, and the number of requests that use it."""

    def __init__(self, model: ServedModel, series: Series) -> None:
        super().__init__()
        self.model = model
        self.series = series
        self.metrics = series.of_model
        self.used = time.monotonic()  # when the last request ended
        self.left: Callable[[], object] = lambda: None  # called when a request has ended

    def enter(self) -> "Version":
        """Counts a request, which must call `leave` when it has ended."""
        self.__enter__()
        return self

    def leave(self) -> None:
        self.__exit__()
        self.used = time.monotonic()
        self.left()

    async def close(self) -> None:
        """Ends the engine and, if no request uses the version, the model's other processes."""
        await self.model.client.close()
        if not self.requests:
            self.model.close()


class VersionRollout(Protocol):
    """Gives a candidate some of the requests of a model, and compares its answers."""

    def pick(self, key: str) -> Version | None:
        """Returns the candidate if a request gets it. Requests with one `key` stay on a version; "": by chance."""

    def compare(self, path: str, body: bytes) -> None:
        """Compares what both versions answer to a request of OpenAI's wire. Returns at once."""


class Serving:
    """One served model: the version that new requests get, and changes of it. Used from one event loop.

    A request takes the version once, with `enter`. So its tokens, its tokenizer and its text are all of that version.
    """

    def __init__(
        self,
        model: ServedModel,
        metrics: Metrics,
        drain_timeout: float = 30.0,
        prepare: Prepare[ServedModel] | None = None,
        room: Callable[[], AbstractAsyncContextManager[None]] | None = None,
        elsewhere: Callable[[float], object] | None = None,
    ) -> None:
        """`metrics` must not have a model of this name yet. `drain_timeout` is in seconds. Without `prepare`, a reload
        never finds a change. An engine that sleeps wakes within `room`: see EngineRoom.starting. `elsewhere` gets the
        seconds of `stay`: another process has the model, and requests enter it by `ModelRegistry.elsewhere`."""
        self.versions = Versions(Version(model, Series(metrics, model)))
        self.reloads = Reloads(self, metrics.reloads, drain_timeout, prepare)
        self.room, self.elsewhere = room, elsewhere
        self.rollout: VersionRollout | None = None
        self.keep_alive: float | None = None  # seconds without a request after which the engine sleeps; None: never
        self._stay: float | None = None  # the same, as the last request wishes
        self._waking: asyncio.Task[None] | None = None
        self._gate: asyncio.Event | None = None  # new requests are held back until it is set; None: they are not

    @property
    def version(self) -> Version:
        return self.versions.current

    @property
    def model(self) -> ServedModel:
        return self.versions.current.model

    def paths(self) -> list[Path]:
        """Returns the folders and files of the versions in use. An engine that is started again reads them again."""
        return [version.model.path for version in self.versions.in_use if version.model.path is not None]

    @property
    def healthy(self) -> bool:
        """False once the engine of the current version has ended for good."""
        return self.model.client.state.status != "ended"

    @property
    def asleep(self) -> bool:
        """True while the engine of the current version is asleep."""
        return self.model.client.state.status == "asleep"

    @property
    def ready(self) -> bool:
        """True if `enter` would return at once."""
        return self._gate is None and self.elsewhere is None and (self.room is None or not self.asleep)

    @property
    def holding(self) -> bool:
        """True while a reload holds new requests back."""
        return self._gate is not None

    async def enter(self, key: Callable[[], str] = str) -> Version:
        """Returns the version for a new request, which must call its `leave`. `key`: see VersionRollout. Blocks while a
        reload holds requests back, and while the engine waits for room. Raises EngineError if it does not start
        then."""
        while not self.ready:
            if self._gate is not None:
                await self._gate.wait()
            else:
                await self._wake_in_room()
        self._stay = None
        candidate = None if self.rollout is None else self.rollout.pick(key())
        return (candidate or self.version).enter()

    def stay(self, seconds: float) -> None:
        """Lets the engine sleep after so many seconds without a request, until the next one; negative: never. Without
        effect on a model that does not sleep by itself."""
        self._stay = seconds if seconds >= 0 else math.inf
        if self.elsewhere is not None:
            self.elsewhere(seconds)

    @property
    def sleeps_after(self) -> float:
        """The seconds without a request after which the engine sleeps."""
        if self._stay is not None:
            return self._stay
        return math.inf if self.keep_alive is None else self.keep_alive

    async def close(self) -> None:
        """Ends all engines. Streams that are still open end with EngineError. May be called twice."""
        if self._waking is not None:
            self._waking.cancel()
        await self.reloads.close()
        await self.versions.close()

    # -- Reloadable -------------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """See Reloadable."""
        self._gate = self._gate or asyncio.Event()
        await self.version.unused()

    def release(self) -> None:
        """See Reloadable. May be called twice."""
        if self._gate is not None:
            gate, self._gate = self._gate, None
            gate.set()

    def exchange(self, model: ServedModel) -> None:
        """See Reloadable."""
        self.versions.exchange(Version(model, self.version.series.after(model)))

    def promote(self, candidate: Version) -> None:
        """Makes the candidate of a rollout the version for new requests. The old version ends as after a reload."""
        series = candidate.series
        candidate.series = self.version.series.after(candidate.model)
        candidate.metrics = candidate.series.of_model
        self.versions.exchange(candidate)
        series.forget()

    # -- sleep ------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Ends the engine until the next request. Raises APIError 409 while requests are in progress."""
        with self.reloads.changing("going to sleep"):
            if self.version.requests:
                raise busy(f"{self.version.requests} requests are being answered; try again when they have ended")
            try:
                await self.model.client.control(Sleep())
            except EngineError as error:
                raise busy(str(error)) from error
            _log.info("%s is asleep: its engine has ended, and the next request starts it", self.model.name)

    async def wake(self) -> None:
        """Starts the engine if it is asleep, and returns when it is ready. Raises EngineError, and APIError 409 while a
        reload holds requests back."""
        if self.holding:
            raise busy("a reload is in progress; try again when it has ended")
        if self.room is None:
            await self._wake_now()
        elif self.asleep:
            await self._wake_in_room()

    async def _wake_now(self) -> None:
        await self.model.client.control(Wake())
        self.version.used = time.monotonic()

    async def _wake_in_room(self) -> None:
        """Wakes the engine, once for all requests that wait. It goes on if a request is cancelled."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake_when_there_is_room())
        try:
            await asyncio.shield(self._waking)
        except asyncio.CancelledError:
            if self._waking.cancelled():
                raise EngineError(f"{self.model.name} was unloaded while the request waited") from None
            raise

    async def _wake_when_there_is_room(self) -> None:
        if self.room is not None:
            async with self.room():
                await self._wake_now()

    async def sleep_when_unused(self) -> None:
        """Calls `sleep` whenever there was no request for `sleeps_after` seconds. Never returns."""
        while True:
            since = self.unused_since
            left = self.sleeps_after - (0.0 if since is None else time.monotonic() - since)
            if left <= 0 and since is not None:
                with contextlib.suppress(APIError):  # a reload, or a request that has just come
                    await self.sleep()
            await asyncio.sleep(min(max(left, 0.05), 1.0))

    # -- Resident ---------------------------------------------------------------------------------------------

    @property
    def has_engine(self) -> bool:
        """See Resident."""
        return self.model.client.state.status not in ("asleep", "ended")

    @property
    def unused_since(self) -> float | None:
        """See Resident."""
        in_use = self.version.requests or self.model.client.state.status != "ready"
        return None if in_use else self.version.used
