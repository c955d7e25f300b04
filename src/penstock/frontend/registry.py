"""The models of a server, by the names that requests use."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.frontend.errors import APIError
from penstock.frontend.requests.context_policy import Summaries
from penstock.frontend.versions.room import EngineRoom, no_room
from penstock.frontend.versions.serving import Serving, Version
from penstock.messages import DeadlineExceeded
from penstock.messages.tensors import TensorModels

if TYPE_CHECKING:
    from penstock.frontend.kserve.shared_memory import ClientMemory

_NO_NAMES = ("dummy", "tgi")  # huggingface_hub sends these if its user names no model
MOST_WAIT_SECONDS = 300.0  # for room for an engine, of a request without a timeout
_MOST_SHOWN = 8  # models that are listed in an error


class OnDemand(NamedTuple):
    """Loads models at their first request."""

    load: Callable[[str], Awaitable[None]]  # raises APIError
    room: EngineRoom


class Elsewhere(Protocol):
    """The process that has the engines of some models."""

    async def enter(self, name: str, key: str, within: float | None) -> Version:
        """See ModelRegistry.enter_within."""


class ModelRegistry:
    """Finds the model that a request names. The first model serves requests that name none."""

    def __init__(
        self, *models: Serving, tensors: TensorModels | None = None, memory: "ClientMemory | None" = None
    ) -> None:
        """`tensors` are the one-shot models of a repository, which may also add models with engines later. `memory` has
        the shared memory that clients may pass tensors in; None: they may not. Raises ValueError if two of the models
        have a name in common."""
        self.all = models
        self.tensors = tensors
        self.memory = memory
        self.absent_models: Callable[[], Collection[str]] = tuple  # names of those that their first request loads
        self.on_demand: OnDemand | None = None  # loads these; None: `elsewhere` does
        self.elsewhere: Elsewhere | None = None
        self.summaries = Summaries()
        self.routes: Mapping[str, str] = {}  # the large model of each route. It is used where no route chooses
        self._essential = models  # the server ends with their engines
        self._check_names()

    @property
    def default(self) -> Serving:
        """The model for requests that name none. Raises APIError 404 if there is none."""
        if not self.all:
            raise APIError(404, "no language model is loaded; load one, or name a model", code="model_not_found")
        return self.all[0]

    @property
    def only(self) -> Serving | None:
        """The one model; None if there are several, or may be."""
        return self.all[0] if len(self.all) == 1 and self.tensors is None else None

    def add(self, served: Serving) -> None:
        """Adds a model; one that generates text goes before those that give vectors. Raises ValueError if it has a name
        of another model."""
        before = self.all
        self.all = tuple(sorted((*before, served), key=lambda each: each.model.pooling is not None))
        try:
            self._check_names()
        except ValueError:
            self.all = before
            raise

    def remove(self, served: Serving) -> None:
        self.all = tuple(each for each in self.all if each is not served)

    def names(self) -> list[str]:
        """Returns every name that requests may use. A model's own name comes before its aliases, routes are last."""
        names = [name for served in self.all for name in served.model.names]
        return [*names, *(route for route, large in self.routes.items() if large in names)]

    def absent_names(self) -> list[str]:
        """Returns the names of the models that are loaded by their first request, sorted."""
        return sorted(self.absent_models())

    def absent(self, name: str | None) -> str | None:
        """Returns the model that a request for `name` has to load first; None if there is none."""
        names = self.absent_models()
        if name is None or name in _NO_NAMES:
            return None if self.all else min(names, default=None)
        name = self.routes.get(name, name)
        return name if name in names else None

    def must_wait(self, name: str | None) -> bool:
        """Whether a request has to wait before its model can be used. Raises APIError 404."""
        return self.absent(name) is not None or not self.find(name).ready

    async def enter(self, name: str | None, key: Callable[[], str] = str) -> Version:
        """Returns the version of the model with this name for a new request, which must call its `leave`. During a
        rollout, requests with one `key` stay on a version. A model that is not loaded is loaded, one that is asleep
        wakes. Raises APIError and EngineError."""
        if (there := self._elsewhere(name)) is not None:
            return await there[0].enter(there[1], key(), None)
        while True:
            if self.on_demand is not None and (absent := self.absent(name)) is not None:
                await self.on_demand.load(absent)
            served = self.find(name)
            version = await served.enter(key)
            if self.find(name) is served:  # else a reload has changed names while the request waited
                return version
            version.leave()

    async def enter_within(self, name: str | None, key: Callable[[], str], seconds: float | None) -> Version:
        """As `enter`, for a request that waits at most so long; None: it has no timeout. Raises APIError 503 if there
        is no room for an engine until then, and DeadlineExceeded if a reload takes longer."""
        if (there := self._elsewhere(name)) is not None:
            return await there[0].enter(there[1], key(), seconds)
        room = None if self.on_demand is None else self.on_demand.room
        if room is not None and seconds is not None and self.must_wait(name) and room.wait_seconds() > seconds:
            raise no_room(name, room)
        try:
            async with asyncio.timeout(MOST_WAIT_SECONDS if seconds is None and room is not None else seconds):
                return await self.enter(name, key)
        except TimeoutError:
            if room is not None and (self.absent(name) is not None or self.find(name).asleep):
                raise no_room(name, room) from None
            message = "the model was being reloaded; send the request again, with a longer timeout"
            raise DeadlineExceeded(message) from None

    def _elsewhere(self, name: str | None) -> tuple[Elsewhere, str] | None:
        """The process that a request has to enter, and the model's name there."""
        if self.elsewhere is None:
            return None
        if (absent := self.absent(name)) is not None:
            return self.elsewhere, absent
        served = self.find(name)
        return None if served.elsewhere is None else (self.elsewhere, served.model.name)

    def find(self, name: str | None) -> Serving:
        """Returns the model that has this name now, since a reload may change names. If `name` is None, returns the
        default model. Raises APIError 404."""
        for served in self.all:
            if name in served.model.names:
                return served
        if name is None or name in _NO_NAMES:
            return self.default
        if name in self.routes:
            return self.find(self.routes[name])
        shown = name if len(name) <= 100 else name[:100] + "..."
        others = [] if self.tensors is None else dict.fromkeys(model.name for model in self.tensors.ready())
        names = [*(served.model.name for served in self.all), *others]
        here = ", ".join(map(repr, names[:_MOST_SHOWN])) or "none"
        message = f"model {shown!r} is not served here; this server has {here}"
        raise APIError(404, message, param="model", code="model_not_found")

    @property
    def healthy(self) -> bool:
        """False once the engine of a model that the server was started with has ended for good."""
        return all(served.healthy for served in self._essential)

    async def close(self) -> None:
        """Ends all engines. Streams that are still open end with EngineError. May be called twice."""
        await asyncio.gather(*(served.close() for served in self.all))

    def _check_names(self) -> None:
        if len(names := self.names()) != len(set(names)):
            raise ValueError(f"two models have the same name: {', '.join(names)}; rename one")
