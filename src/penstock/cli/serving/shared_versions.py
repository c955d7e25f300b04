"""The versions of a model that several API processes serve, as the supervisor exchanges them.

A reload has two phases. First every process loads the new version and says so. Only if all have, all are ordered to
exchange it; else all forget it. A process that is started meanwhile has the version that all are on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.cli.operate.reload import LoadedVersion, Reloader
from penstock.cli.serving.api_process import ApiStart, NewVersion
from penstock.cli.serving.process_slot import ProcessSlot
from penstock.engine.client import StreamingClient
from penstock.engine.shared.hub import Hub
from penstock.frontend.versions.reloads import Start
from penstock.frontend.versions.series import Series
from penstock.messages import EngineError
from penstock.observe.costs import CostModel
from penstock.observe.metrics import Metrics
from penstock.prepare.served import fingerprint_of

_log = logging.getLogger("penstock.serving")

Answer = Callable[[Hub, str], Awaitable[str]]  # the reply to an operator's command for a version's engine


@dataclass(frozen=True)
class SharedModel:
    """A version: its engine, and what API processes are started with to serve it."""

    start: ApiStart  # of slot 0
    client: StreamingClient
    costs: CostModel | None
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", fingerprint_of(self.client.info, self.start.texts))

    @property
    def name(self) -> str:
        return self.start.answers.server.served_model_name


class SharedVersions:
    """A frontend.versions.reloads.Versions of several processes."""

    def __init__(self, model: SharedModel, slots: Sequence[ProcessSlot], metrics: Metrics, answer: Answer) -> None:
        self.model = model
        self._series = Series(metrics, model)
        self.hub = Hub(model.client, model.start.version)
        self.hub.on_step = self._observe(self._series)
        self._slots, self._answer = slots, answer
        self._offered = self.hub.version  # the last version that was offered to processes
        self._next = self.hub  # of that version
        self._old: tuple[Hub, Series] | None = None
        self._retiring: asyncio.Task[None] | None = None

    @property
    def requests(self) -> int:
        return self.hub.requests

    @property
    def retiring(self) -> int | None:
        return None if self._old is None else self._old[0].requests

    @property
    def series(self) -> list[Series]:
        """The series of the version, and of the one before if that has another name and is still used."""
        old = self._old
        return [self._series] if old is None or old[1] is self._series else [self._series, old[1]]

    def join(self, slot: ProcessSlot) -> None:
        """Gives a process that has been started with the version a port."""
        hub = self.hub
        slot.join(hub, lambda message: self._answer(hub, message))

    async def hold(self) -> None:
        """See frontend.versions.reloads.Versions. Raises EngineError if a process ends."""
        await asyncio.gather(*(slot.hold() for slot in self._slots))

    def release(self) -> None:
        self.order("release")

    def starts(self, reloader: Reloader, new: LoadedVersion) -> Start[SharedModel]:
        """Returns what starts the engine of a version and lets all processes load it."""

        async def start() -> SharedModel:
            client, costs = await reloader.start_engine(new, self.model.client.info)
            self._offered += 1
            fields = {"answers": new.prepared.answers, "texts": new.texts, "created": int(time.time())}
            start = msgspec.structs.replace(self.model.start, version=self._offered, **fields)
            model = SharedModel(start, client, costs)
            try:
                await self._offer(model)
            except BaseException:
                await client.close()
                raise
            reloader.serves(new)
            return model

        return start

    async def _offer(self, model: SharedModel) -> None:
        """Lets all processes load a version. Raises EngineError if one cannot, and then no process has it."""
        start = model.start
        self._next = hub = Hub(model.client, start.version)

        def answer(message: str) -> Awaitable[str]:
            return self._answer(hub, message)

        settings = msgspec.json.encode(NewVersion(answers=start.answers, texts=start.texts, created=start.created))
        _log.info(
            "the engine of %s %s is ready; %d API processes load the version",
            model.name,
            model.fingerprint,
            len(self._slots),
        )
        try:
            await asyncio.gather(*(slot.load(hub, answer, settings) for slot in self._slots))
            for slot in self._slots:
                if slot.loaded != start.version:
                    raise EngineError(f"API process {slot.number} has ended; reload again")
        except BaseException:
            self.order("withdraw")
            for slot in self._slots:
                slot.leave(hub)
            hub.close()
            raise

    def exchange(self, model: SharedModel) -> None:
        """See frontend.versions.reloads.Versions. All processes have loaded the version."""
        old, series, hub = self.model, self._series, self.hub
        self.model, self._series = model, series.after(model)
        self.hub, self._old = self._next, (hub, series)
        self.hub.on_step = self._observe(self._series)
        for slot in self._slots:
            slot.start = msgspec.structs.replace(model.start, number=slot.number)
        self.order("exchange")
        self._retiring = asyncio.create_task(self._retire(old, hub, series))

    async def close(self) -> None:
        """Closes all ports and ends all engines."""
        if self._retiring is not None and self._old is not None:
            self._retiring.cancel()
            self._old[0].close()
            await self._old[0].client.close()
        self.hub.close()
        await self.model.client.close()

    async def _retire(self, old: SharedModel, hub: Hub, series: Series) -> None:
        began = time.monotonic()
        await hub.left()
        hub.close()
        await old.client.close()
        series.ended(old.client, self._series)
        self._old = None
        _log.info("%s %s has ended, after %.1f s", old.name, old.fingerprint, time.monotonic() - began)

    def _observe(self, series: Series) -> Callable[[object], None]:
        return lambda stats: series.of_model.observe_steps(series.engines.stats())

    def order(self, name: str) -> None:
        """Sends all processes an order."""
        for slot in self._slots:
            slot.order(name)
