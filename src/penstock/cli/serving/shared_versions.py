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

from penstock.cli.operate.reload import Load, LoadedVersion
from penstock.cli.serving.api_process import ApiStart
from penstock.cli.serving.process_slot import ProcessSlot
from penstock.cli.serving.shared.catalogue import NewVersion
from penstock.engine.client import StreamingClient
from penstock.engine.shared.hub import Hub
from penstock.frontend.versions.series import Series
from penstock.frontend.versions.versions import Versions
from penstock.messages import ControlAnswer, ControlMessage, EngineError
from penstock.observe.costs import CostModel
from penstock.observe.metrics import Metrics
from penstock.prepare.served import fingerprint_of

_log = logging.getLogger("penstock.serving")

OperateVersion = Callable[[Hub, ControlMessage], Awaitable[ControlAnswer]]  # executes a message for a version's engine


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
        return self.start.server.served_model_name


class SharedVersion:
    """A version, and the hub that shares its engine among the processes."""

    def __init__(self, model: SharedModel, hub: Hub, series: Series) -> None:
        self.model, self.hub, self.series = model, hub, series
        hub.on_step = lambda stats: series.of_model.observe_steps(series.engines.stats())

    @property
    def requests(self) -> int:
        return self.hub.requests

    async def unused(self) -> None:
        """Returns when all processes have left the version."""
        await self.hub.left()

    async def close(self) -> None:
        self.hub.close()
        await self.model.client.close()


class SharedVersions:
    """A frontend.versions.reloads.Reloadable of several processes."""

    def __init__(
        self, model: SharedModel, slots: Sequence[ProcessSlot], metrics: Metrics, operate: OperateVersion
    ) -> None:
        hub = Hub(model.client, model.start.version)
        self.versions = Versions(SharedVersion(model, hub, Series(metrics, model)))
        self._slots, self._operate = slots, operate
        self._offered = hub.version  # the last version that was offered to processes
        self._next = hub  # of that version

    @property
    def model(self) -> SharedModel:
        return self.versions.current.model

    def join(self, slot: ProcessSlot) -> None:
        """Gives a process that has been started with the version a port."""
        hub = self.versions.current.hub
        slot.join(hub, lambda message: self._operate(hub, message))

    async def hold(self) -> None:
        """See Reloadable. Raises EngineError if a process ends."""
        await asyncio.gather(*(slot.hold() for slot in self._slots))

    def release(self) -> None:
        self.order("release")

    async def loader(self, new: LoadedVersion, before: SharedModel) -> Load[SharedModel]:
        """The Loader of several processes: all of them load the version."""

        async def load(client: StreamingClient, costs: CostModel | None) -> SharedModel:
            self._offered += 1
            fields = {
                "answers": new.prepared.answers,
                "server": new.prepared.resolved.server,
                "texts": new.texts,
                "created": int(time.time()),
            }
            start = msgspec.structs.replace(before.start, version=self._offered, **fields)
            model = SharedModel(start, client, costs)
            await self._offer(model)
            return model

        return load

    async def _offer(self, model: SharedModel) -> None:
        """Lets all processes load a version. Raises EngineError if one cannot, and then no process has it."""
        start = model.start
        self._next = hub = Hub(model.client, start.version)

        def operate(message: ControlMessage) -> Awaitable[ControlAnswer]:
            return self._operate(hub, message)

        assert start.answers is not None
        settings = msgspec.json.encode(NewVersion(answers=start.answers, texts=start.texts, created=start.created))
        _log.info(
            "the engine of %s %s is ready; %d API processes load the version",
            model.name,
            model.fingerprint,
            len(self._slots),
        )
        try:
            await asyncio.gather(*(slot.load(hub, operate, settings) for slot in self._slots))
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
        """See Reloadable. All processes have loaded the version."""
        series = self.versions.current.series.after(model)
        self.versions.exchange(SharedVersion(model, self._next, series))
        for slot in self._slots:
            slot.start = msgspec.structs.replace(model.start, number=slot.number)
        self.order("exchange")

    def order(self, name: str) -> None:
        """Sends all processes an order."""
        for slot in self._slots:
            slot.order(name)
