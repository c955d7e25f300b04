"""The steps of a reload, the reasons for which it is refused, and its answer."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from penstock.frontend.errors import APIError
from penstock.frontend.versions.series import Model
from penstock.frontend.versions.versions import Versions
from penstock.messages import EngineError, Sleep, Wake

_log = logging.getLogger("penstock.serving")

M = TypeVar("M", bound=Model)
M_contra = TypeVar("M_contra", bound=Model, contravariant=True)
# Starts the engine of a new version. Returns the model once its engine has computed a token. Raises EngineError.
Start = Callable[[], Awaitable[M]]
# Called with the model that is served, and with whether the new engine must fit into memory beside the old one. Reads
# the settings and the model again. Returns None if nothing has changed. Raises ValueError or OSError, whose text says
# what to change.
Prepare = Callable[[M, bool], Awaitable[Start[M] | None]]


class Reloadable(Protocol[M_contra]):
    """A served model. One process and several processes implement these methods differently."""

    @property
    def versions(self) -> Versions[Any]: ...
    async def hold(self) -> None:
        """Holds new requests back until `release`. Returns when no request uses the current version."""

    def release(self) -> None:
        """Lets the held requests continue."""

    def exchange(self, model: M_contra) -> None:
        """Makes `model` the version for new requests. The old version ends when its last request has ended."""


class Reloads(Generic[M]):
    """The reloads of a model, one at a time."""

    def __init__(
        self, served: Reloadable[M], results: dict[str, int], drain_timeout: float, prepare: Prepare[M] | None
    ) -> None:
        """`results` counts reloads by their results. `drain_timeout` is in seconds. Without `prepare`, a reload never
        finds a change."""
        self.prepare = prepare
        self._served, self._results, self._drain_timeout = served, results, drain_timeout
        self._change = ""  # the change in progress; empty if there is none
        self._tasks: set[asyncio.Task[str]] = set()

    async def reload(self, *, drain_first: bool = False) -> str:
        """Loads the model and its settings again. Returns a sentence about the result. The reload continues if the
        caller is cancelled.

        New requests get the new version once it has computed a token; requests in progress end on the old one. With
        `drain_first`, new requests are held back, and the old engine ends before the new one starts, so both need not
        fit into memory. Raises APIError if the reload fails or is refused; the old version then continues.
        """
        task = asyncio.create_task(self._reload(drain_first))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends the reload that is in progress. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Makes `what` the change in progress. Raises APIError 409 if there is another one, or if the version before
        still has requests."""
        if self._change:
            raise busy(f"{self._change} is in progress; try again when it has ended")
        if (requests := self._served.versions.retiring) is not None:
            raise busy(
                f"the version before the last reload still answers {requests} requests; try again when they have ended"
            )
        self._change = what
        try:
            yield
        finally:
            self._change = ""

    async def _reload(self, drain_first: bool) -> str:
        versions = self._served.versions
        began, old, result = time.monotonic(), versions.current.model, "failed"
        try:
            with self.changing("a reload"):
                result = "refused"  # what prepare finds wrong keeps anything from being started
                start = None if self.prepare is None else await self.prepare(old, not drain_first)
                result = "failed"
                if start is None:
                    result = "unchanged"
                    return f"nothing has changed: {old.name} {old.fingerprint} goes on"
                if drain_first:
                    await self._exchange_alone(start)
                else:
                    self._served.exchange(await start())
                result = "done"
        except APIError as error:
            result = "refused" if error.code == "model_busy" else result
            raise
        except (ValueError, OSError, EngineError) as error:
            _log.error("the reload failed, and %s %s goes on: %s", old.name, old.fingerprint, error)
            message = f"nothing was reloaded, and the old version goes on: {error}"
            raise APIError(422, message, code="reload_failed") from error
        finally:
            self._results[result] += 1
        new, left = versions.current.model, versions.retiring or 0
        seconds = time.monotonic() - began
        _log.info(
            "reloaded in %.1f s: new requests get %s %s; %d requests end on %s %s",
            *(seconds, new.name, new.fingerprint, left, old.name, old.fingerprint),
        )
        return f"{new.name} {new.fingerprint} serves after {seconds:.1f} s; {left} requests end on the old one"

    async def _exchange_alone(self, start: Start[M]) -> None:
        """Ends the old engine before the new one starts. If the new one fails, the old one is started again."""
        served, version = self._served, self._served.versions.current
        try:
            try:
                async with asyncio.timeout(self._drain_timeout):
                    await served.hold()
            except TimeoutError:
                raise busy(
                    f"{version.requests} requests still run after {self._drain_timeout:g} s (--drain-timeout), and "
                    "nothing was changed; try again later, or without --drain-first"
                ) from None
            await version.model.client.control(Sleep())
            try:
                served.exchange(await start())
            except Exception as error:
                try:
                    await version.model.client.control(Wake())
                except EngineError as second:
                    raise EngineError(f"{error}. The old version's engine does not start again: {second}") from error
                raise
        finally:
            served.release()


def busy(message: str) -> APIError:
    """Returns the error of a change that cannot be made now."""
    return APIError(409, message, code="model_busy")
