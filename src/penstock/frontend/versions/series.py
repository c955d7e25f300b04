"""The metrics of the versions of a model that a server serves one after another."""

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
    def state(self) -> EngineState:
        state = self._clients[0].state
        others = self._restarts + sum(client.state.restarts for client in self._clients[1:])
        return replace(state, restarts=state.restarts + others)

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
        self._restarts += client.state.restarts


class Series:
    """The metrics of a model's name, and the engines that serve it one after another."""

    def __init__(self, metrics: Metrics, model: Model) -> None:
        self._metrics = metrics
        self.engines = Engines(model.client)
        self.of_model = metrics.model(model.name, self.engines, model.costs)
        self.of_model.fingerprint = model.fingerprint

    def after(self, model: Model) -> "Series":
        """Returns the series of the next version, which are the same if it has the same name."""
        if model.name != self.of_model.name:
            return Series(self._metrics, model)
        self.engines.add(model.client)
        self.of_model.exchange(model.costs)
        self.of_model.fingerprint = model.fingerprint
        return self

    def ended(self, client: EngineClient, now: "Series") -> None:
        """Takes note that the engine of a version has ended. `now` is of the version that is served."""
        self.engines.remove(client)
        if now is not self:
            self._metrics.forget(self.of_model.name)
