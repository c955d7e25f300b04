"""The metrics of a model across its versions."""

from typing import Protocol

from msgspec.structs import replace

from penstock.messages import EngineClient, EngineInfo, EngineState, EngineStats, Queue
from penstock.observe.costs import CostModel
from penstock.observe.metrics import Metrics


class Model(Protocol):
    """A model with its engine."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def client(self) -> EngineClient: ...
    @property
    def costs(self) -> CostModel | None: ...


class Engines:
    """Presents the engines of all versions to the metrics as one engine, so that no counter ever decreases."""

    def __init__(self, client: EngineClient) -> None:
        self._clients = [client]  # the newest first; the others finish their last requests
        self._first: EngineClient | None = client  # None once there was a second one
        self._ended = EngineStats()  # the counts of engines that have ended
        self._restarts = 0  # of engines that have ended
        self._last: tuple[EngineStats, EngineStats] | None = None  # a cache: stats of the only engine, plus `_ended`

    @property
    def info(self) -> EngineInfo:
        return self._clients[0].info

    @property
    def state(self) -> EngineState:
        state = self._clients[0].state
        others = self._restarts + sum(client.state.restarts for client in self._clients[1:])
        return replace(state, restarts=state.restarts + others)

    @property
    def queue(self) -> Queue:
        return self._clients[0].queue

    def stats(self) -> EngineStats:
        if self._first is not None:  # a fast path, since this is called for each delta
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
        """Adds the engine of a new version, which gets all new requests."""
        client.queue.refused += self.queue.refused
        client.queue.late += self.queue.late
        self._clients.insert(0, client)
        self._first = None

    def remove(self, client: EngineClient) -> None:
        """Removes an engine that has ended, but keeps its counts."""
        self._clients.remove(client)
        self._ended = client.stats().ended().after(self._ended)
        self._restarts += client.state.restarts


class Series:
    """The metrics under one model name, and the engines of its versions."""

    def __init__(self, metrics: Metrics, model: Model, name: str | None = None) -> None:
        """Under `name`; None: under that of the model."""
        self._metrics = metrics
        self.engines = Engines(model.client)
        self.of_model = metrics.model(name or model.name, self.engines, model.costs)
        self.of_model.fingerprint = model.fingerprint

    def after(self, model: Model) -> "Series":
        """Returns the series of the next version: this one if the name is the same, else a new one."""
        if model.name != self.of_model.name:
            return Series(self._metrics, model)
        self.engines.add(model.client)
        self.of_model.exchange(model.costs)
        self.of_model.fingerprint = model.fingerprint
        return self

    def forget(self) -> None:
        """Removes the series from the metrics."""
        self._metrics.forget(self.of_model.name)

    def ended(self, client: EngineClient, now: "Series") -> None:
        """Removes the engine of a version that has ended. `now` is the series of the version that is served."""
        self.engines.remove(client)
        if now is not self:
            self.forget()
