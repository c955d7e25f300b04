"""The model that new requests get: how a reload exchanges it, and how its engine sleeps."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from msgspec.structs import replace

from penstock.frontend.errors import APIError
from penstock.frontend.served import ServedModel
from penstock.messages import EngineClient, EngineError, EngineInfo, EngineStats, Queue
from penstock.observe.metrics import Metrics
from penstock.observe.model_metrics import ModelMetrics

_log = logging.getLogger("penstock.serving")

# Starts the engine of a new version, and returns the model when it has computed a token. Raises EngineError.
Start = Callable[[], Awaitable[ServedModel]]
# Reads settings and model again. Returns None if nothing has changed since the model that is served was loaded. With
# `beside`, checks that the new engine fits beside the old one. Raises ValueError or OSError, with what to change.
Prepare = Callable[[ServedModel, bool], Awaitable[Start | None]]


class Version:
    """A model as it was loaded once, and the number of requests that use it."""

    def __init__(self, model: ServedModel, metrics: ModelMetrics) -> None:
        self.model = model
        self.metrics = metrics
        self.requests = 0
        self.used = time.monotonic()  # when the last request ended
        self._unused = asyncio.Event()
        self._unused.set()

    def enter(self) -> "Version":
        """Counts a request, which must call `leave` when it has ended."""
        self.requests += 1
        self._unused.clear()
        return self

    def leave(self) -> None:
        self.requests -= 1
        self.used = time.monotonic()
        if not self.requests:
            self._unused.set()

    async def unused(self) -> None:
        """Returns when no request uses the version."""
        await self._unused.wait()


class Engines:
    """The engines that serve a model one after another, as one engine for the metrics: no counter goes back."""

    def __init__(self, client: EngineClient) -> None:
        self._clients = [client]  # the newest first; the others answer their last requests
        self._first: EngineClient | None = client  # until there is a second one
        self._ended = EngineStats()  # what engines counted that have ended
        self._restarts = 0  # of these
        self._last: tuple[EngineStats, EngineStats] | None = None  # stats of the only engine, and its sum with `_ended`

    @property
    def info(self) -> EngineInfo:
        return self._clients[0].info

    @property
    def healthy(self) -> bool:
        return self._clients[0].healthy

    @property
    def restarting(self) -> bool:
        return self._clients[0].restarting

    @property
    def asleep(self) -> bool:
        return self._clients[0].asleep

    @property
    def restarts(self) -> int:
        return self._restarts + sum(client.restarts for client in self._clients)

    @property
    def queue(self) -> Queue:
        return self._clients[0].queue

    def stats(self) -> EngineStats:
        if self._first is not None:  # called for each delta
            return self._first.stats()
        newest, *others = self._clients
        stats = newest.stats()
        if not others and self._last is not None and self._last[0] is stats:
            return self._last[1]
        total = stats.after(self._ended)
        for now in (other.stats() for other in others):
            total = replace(
                total.after(now.ended()), running=total.running + now.running, waiting=total.waiting + now.waiting
            )
        self._last = None if others else (stats, total)
        return total

    def add(self, client: EngineClient) -> None:
        """Takes an engine that gets all new requests from now on."""
        client.queue.refused += self.queue.refused
        client.queue.late += self.queue.late
        self._clients.insert(0, client)
        self._first = None

    def remove(self, client: EngineClient) -> None:
        """Forgets an engine that has ended, but not what it counted."""
        self._clients.remove(client)
        self._ended = client.stats().ended().after(self._ended)
        self._restarts += client.restarts


class Serving:
    """The version that new requests get, and the changes to it. Used from one event loop.

    A request takes the version once, with `enter`: so the text of an answer, its tokens and its tokenizer are of one
    version. `healthy` and `close` are those of all engines.
    """

    def __init__(
        self, model: ServedModel, metrics: Metrics, drain_timeout: float = 30.0, prepare: Prepare | None = None
    ) -> None:
        """`drain_timeout` is in seconds. Without `prepare`, there is no reload."""
        self._metrics = metrics
        self._drain_timeout = drain_timeout
        self.prepare = prepare
        self._engines = Engines(model.client)
        self.version = Version(model, metrics.model(model.name, self._engines, model.costs))
        self.version.metrics.fingerprint = model.fingerprint
        self._change = ""  # what changes the version now
        self._gate: asyncio.Event | None = None  # while new requests wait
        self._retiring: asyncio.Task[None] | None = None
        self._old: Version | None = None  # the version before, while requests use it
        self._tasks: set[asyncio.Task[str]] = set()

    @property
    def model(self) -> ServedModel:
        return self.version.model

    @property
    def healthy(self) -> bool:
        """False once the engine of the version has ended for good."""
        return self.model.client.healthy

    @property
    def holding(self) -> bool:
        """True while new requests wait for a reload."""
        return self._gate is not None

    async def enter(self) -> Version:
        """Returns the version for a new request, which must call its `leave`. Waits while a reload holds requests."""
        while self._gate is not None:
            await self._gate.wait()
        return self.version.enter()

    async def close(self) -> None:
        """Ends all engines. Streams that are still open end with EngineError. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._old is not None:
            await self._old.model.client.close()
        await self.model.client.close()
        if self._retiring is not None:
            self._retiring.cancel()
            await asyncio.gather(self._retiring, return_exceptions=True)

    # -- reload -----------------------------------------------------------------------------------------------

    async def reload(self, *, drain_first: bool = False) -> str:
        """Loads the model and its settings again, and returns a sentence about what was done. It goes on if the caller
        is cancelled.

        New requests get the new version once it has computed a token; requests in progress end on the old one. With
        `drain_first`, new requests wait first, and the old engine is ended before the new one starts. Raises APIError;
        then the old version goes on.
        """
        task = asyncio.create_task(self._reload(drain_first))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _reload(self, drain_first: bool) -> str:
        began, old, result = time.monotonic(), self.version, "failed"
        try:
            with self._changing("a reload"):
                start = None if self.prepare is None else await self.prepare(old.model, not drain_first)
                if start is None:
                    result = "unchanged"
                    return f"nothing has changed: {old.model.name} {old.model.fingerprint} goes on"
                if drain_first:
                    await self._exchange_alone(start)
                else:
                    self._exchange(await start())
                result = "done"
        except APIError as error:
            result = "refused" if error.code == "model_busy" else "failed"
            raise
        except (ValueError, OSError, EngineError) as error:
            _log.error("the reload failed, and %s %s goes on: %s", old.model.name, old.model.fingerprint, error)
            message = f"nothing was reloaded, and the old version goes on: {error}"
            raise APIError(422, message, code="reload_failed") from error
        finally:
            self._metrics.reloads[result] += 1
        new = self.model
        seconds = time.monotonic() - began
        _log.info(
            "reloaded in %.1f s: new requests get %s %s; %d requests end on %s %s",
            *(seconds, new.name, new.fingerprint, old.requests, old.model.name, old.model.fingerprint),
        )
        return f"{new.name} {new.fingerprint} serves after {seconds:.1f} s; {old.requests} requests end on the old one"

    async def _exchange_alone(self, start: Start) -> None:
        """Ends the old engine before the new one starts. If the new one fails, the old one is started again."""
        old = self.version
        self._gate = gate = asyncio.Event()
        try:
            try:
                async with asyncio.timeout(self._drain_timeout):
                    await old.unused()
            except TimeoutError:
                raise _busy(
                    f"{old.requests} requests still run after {self._drain_timeout:g} s (--drain-timeout), and nothing "
                    "was changed; try again later, or without --drain-first"
                ) from None
            await old.model.client.sleep()
            try:
                self._exchange(await start())
            except Exception:
                await old.model.client.wake()
                raise
        finally:
            self._gate = None
            gate.set()

    def _exchange(self, model: ServedModel) -> None:
        old, engines = self.version, self._engines
        if model.name == old.model.name:
            engines.add(model.client)
            metrics = old.metrics
            metrics.exchange(model.costs)
        else:
            self._engines = Engines(model.client)
            metrics = self._metrics.model(model.name, self._engines, model.costs)
        metrics.fingerprint = model.fingerprint
        self.version, self._old = Version(model, metrics), old
        self._retiring = asyncio.create_task(self._retire(old, engines))

    async def _retire(self, old: Version, engines: Engines) -> None:
        """Ends a version when its last request has ended."""
        began = time.monotonic()
        await old.unused()
        await old.model.client.close()
        engines.remove(old.model.client)
        if engines is not self._engines:
            self._metrics.forget(old.model.name)
        await asyncio.to_thread(old.model.grammars.close)
        self._old = None
        _log.info("%s %s has ended, after %.1f s", old.model.name, old.model.fingerprint, time.monotonic() - began)

    # -- sleep ------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Ends the engine, until a request comes. Raises APIError 409 while requests are answered."""
        with self._changing("going to sleep"):
            if self.version.requests:
                raise _busy(f"{self.version.requests} requests are being answered; try again when they have ended")
            try:
                await self.model.client.sleep()
            except EngineError as error:
                raise _busy(str(error)) from error
            _log.info("%s is asleep: its engine has ended, and the next request starts it", self.model.name)

    async def wake(self) -> None:
        """Returns when the engine is there. Raises EngineError, and APIError 409 while a reload holds requests back."""
        if self.holding:
            raise _busy(f"{self._change} is in progress; try again when it has ended")
        await self.model.client.wake()
        self.version.used = time.monotonic()

    async def sleep_when_unused(self, seconds: float) -> None:
        """Sleeps whenever no request has come for so many seconds. Never returns."""
        while True:
            version, client = self.version, self.model.client
            left = version.used + seconds - time.monotonic()
            if left <= 0 and not (version.requests or client.asleep or client.restarting):
                with contextlib.suppress(APIError):  # a reload, or a request that has just come
                    await self.sleep()
            await asyncio.sleep(max(left, min(seconds, 1.0)))

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Refuses two changes at a time."""
        if self._change:
            raise _busy(f"{self._change} is in progress; try again when it has ended")
        if self._old is not None:
            raise _busy(
                f"the version before the last reload still answers {self._old.requests} requests; try again when they "
                "have ended"
            )
        self._change = what
        try:
            yield
        finally:
            self._change = ""


def _busy(message: str) -> APIError:
    return APIError(409, message, code="model_busy")
