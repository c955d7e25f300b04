"""Chooses the models that answer a request: those of a route, and others if the one that it names cannot."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.frontend.call import Call
from penstock.frontend.errors import APIError, GenerationFailed, ProviderFailed
from penstock.frontend.generation import Updates
from penstock.frontend.providers.routing import HeldAnswer, ModelRoute
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.versions.serving import Serving
from penstock.messages import EngineError, QueueFull
from penstock.observe.tracing import RequestTrace
from penstock.tasks import spawn

SILENT_SECONDS = 20.0  # for which a stream has no headers while another model may still answer
_FAILED = (ProviderFailed, QueueFull, EngineError, GenerationFailed)


class Fallbacks:
    """The models that answer if another one cannot, in order, by its name."""

    def __init__(
        self, models: ModelRegistry, others: Mapping[str, Sequence[str]], routes: Mapping[str, ModelRoute]
    ) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # by the model that could not answer and the next one
        self.routed: Counter[tuple[str, str]] = Counter()  # by route and the model that was chosen
        self.routes = routes
        self._models, self._others = models, others
        self._waking: set[asyncio.Task[None]] = set()

    def after(self, name: str | None) -> Sequence[str]:
        """Returns the models to try after the one that a request names."""
        for served in self._models.all:
            if name is None or name in served.model.names:
                return self._others.get(served.model.name, ())
        return self._others.get(name or "", ())

    def usable(self, name: str | None) -> bool:
        """Returns whether a model can be expected to take a request now. One that is asleep begins to wake."""
        if self._models.absent(name) is not None:
            return True  # the request loads it
        served = self._models.find(name)
        if served.model.remote is not None:
            return served.model.remote.provider.up
        status = served.model.client.state.status
        if status == "asleep":
            spawn(self._waking, _wake(served))
        return status == "ready"


class Trial:
    """The models that are tried for one request, one after the other."""

    def __init__(self, fallbacks: Fallbacks, body: bytes) -> None:
        """`body` is that of the request. A route's classifier reads its prompt."""
        self._fallbacks, self._body = fallbacks, body
        self._cascade: ModelRoute | None = None  # decides whether the answer of the first model is good enough
        self._targets: Sequence[str | None] = ()
        self._number = 0  # of the model that is tried

    @property
    def last(self) -> bool:
        """True if no other model follows."""
        return self._number + 1 >= len(self._targets)

    @property
    def silent_seconds(self) -> float | None:
        """How long a stream may have no headers; None: as always."""
        return None if self.last else SILENT_SECONDS

    def model_for(self, name: str | None) -> str | None:
        """Returns the model to try for a request that names `name`. Models that cannot take a request now are passed
        over, but for the last one."""
        if not self._targets:
            self._targets = self._choose(name)
            self._body = b""
        while not self.last and not self._fallbacks.usable(self._targets[self._number]):
            self._next()
        return self._targets[self._number]

    def generation(self, call: Call, start: float, request_id: str, trace: RequestTrace | None) -> Updates:
        """Returns the output of a call. That of a cascade's small model is held until it is known to be good enough."""
        if self._cascade is None or self._number or self.last:
            return call.generation(start, request_id, trace)
        return HeldAnswer(self._cascade, call, start, request_id, trace)

    def goes_on(self, error: Exception) -> bool:
        """Returns True if another model is tried after an error. A client's mistake, or its quota, is the same
        everywhere."""
        unavailable = isinstance(error, APIError) and error.status == 503
        if self.last or not (unavailable or isinstance(error, _FAILED)):
            return False
        self._next()
        return True

    def _choose(self, name: str | None) -> Sequence[str | None]:
        """The models to try for a request that names `name`, in order."""
        fallbacks = self._fallbacks
        route = fallbacks.routes.get(name or "")
        if route is None:
            return (name, *fallbacks.after(name))
        chosen = route.choose(self._body)
        fallbacks.routed[name or "", chosen] += 1
        large = (route.entry.large, *fallbacks.after(route.entry.large))
        if chosen == route.entry.large:
            return large
        self._cascade = route if route.entry.logprob is not None else None
        return (chosen, *large)

    def _next(self) -> None:
        self._number += 1
        before, after = self._targets[self._number - 1 : self._number + 1]
        self._fallbacks.counts[before or "default", after or ""] += 1


async def _wake(served: Serving) -> None:
    with contextlib.suppress(EngineError, APIError):  # a request for it says why
        await served.wake()
