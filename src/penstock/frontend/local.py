"""Answers requests of a wire that do not come over HTTP: the lines of a batch."""

import asyncio
import logging
import secrets
import time

from msgspec.structs import replace

from penstock.frontend.answer import collect
from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import INTERNAL_ERROR, APIError, as_api_error
from penstock.frontend.generation import Generation, PromptPart
from penstock.frontend.http.asgi import Answer
from penstock.frontend.jobs.lines import PATHS
from penstock.frontend.limits import RequestLimits
from penstock.frontend.requests.pooling import check_generates
from penstock.frontend.served import ServedModel
from penstock.frontend.serving import Serving
from penstock.frontend.wires import OPENAI, RESPONSES
from penstock.messages import EngineError
from penstock.observe.model_metrics import ModelMetrics

_log = logging.getLogger("penstock.frontend")
RETRY_SECONDS = 0.5
MOST_FAILURES = 5  # of a request that the server began, and could not end: it may be what stops the server
_ROUTES = {
    route.path: (wire, route)
    for wire in (OPENAI, RESPONSES)
    for route in wire.routes
    if route.method == "POST" and route.path in PATHS
}


class LocalRequests:
    """Answers requests of OpenAI's wire with a model."""

    def __init__(
        self,
        model: ServedModel,
        limits: RequestLimits,
        metrics: ModelMetrics,
        seed: int | None,
        priority: int | None = None,
    ) -> None:
        """`seed` is for requests that have none; None: each gets a random one. `priority` replaces that of every
        request."""
        self._priority = priority
        self._model = model
        self._limits = limits
        self._metrics = metrics
        self._seed = seed

    async def answer(self, path: str, body: bytes, request_id: str = "", tenant: str = "") -> Answer:
        """Returns the whole answer to a POST request for one of `PATHS`; for a request that fails, the error's answer.

        Raises EngineError if the engine has ended.
        """
        made = await self._try(path, body, request_id, tenant)
        return _ROUTES[path][0].encode_error(made) if isinstance(made, APIError) else made

    async def _try(self, path: str, body: bytes, request_id: str, tenant: str) -> Answer | APIError:
        context = RequestContext(
            self._model,
            self._limits,
            id=request_id or secrets.token_hex(12),
            created=int(time.time()),
            path={},
            headers=(),
            metrics=self._metrics,
            tenant=tenant,
            seed=self._seed,
        )
        wire, route = _ROUTES[path]
        function = getattr(wire.package, route.function)
        try:
            if route.kind == "answer":
                return Answer(await function(body, context))
            check_generates(self._model)
            call: Call = await function(body, context)
            parts = call.parts if self._priority is None else [self._prioritised(part) for part in call.parts]
            generation = Generation(self._model, parts, self._metrics, call.operation, time.monotonic())
            return Answer(await collect(generation, call.codec))
        except EngineError:
            raise
        except Exception as error:
            failure = as_api_error(error, self._limits.retry_after)
            if failure.code == INTERNAL_ERROR:
                _log.exception("a request failed")
            return failure

    async def answer_later(self, path: str, body: bytes, request_id: str, tenant: str = "") -> Answer:
        """Like `answer`, but waits while the queue is full, and while the engine is started again. A request that fails
        with 503, as for lack of memory, is tried a few times."""
        failures, wait = 0, RETRY_SECONDS
        while True:
            try:
                made = await self._try(path, body, request_id, tenant)
            except EngineError:
                if not self._model.client.healthy:
                    raise
            else:
                if isinstance(made, Answer):
                    return made
                failures += made.status == 503
                if made.status not in (429, 503) or failures >= MOST_FAILURES:
                    return _ROUTES[path][0].encode_error(made)
                wait = RETRY_SECONDS * 2**failures if made.status == 503 else RETRY_SECONDS
            await asyncio.sleep(wait)

    def _prioritised(self, part: PromptPart) -> PromptPart:
        return replace(part, request=replace(part.request, priority=self._priority))


class ServedRequests:
    """Answers requests as LocalRequests does, each with the version of the model that new requests get."""

    def __init__(self, serving: Serving, limits: RequestLimits, seed: int | None, priority: int) -> None:
        self._serving = serving
        self._limits = limits
        self._seed = seed
        self._priority = priority
        self._own = 0  # requests being answered here

    def others(self) -> int:
        """How many requests of clients use the model. Those that only look, such as at a batch, are not counted."""
        return self._serving.version.requests - self._own

    async def answer_later(self, path: str, body: bytes, request_id: str, tenant: str = "") -> Answer:
        """See LocalRequests.answer_later."""
        version = await self._serving.enter()
        self._own += 1
        try:
            local = LocalRequests(version.model, self._limits, version.metrics, self._seed, self._priority)
            return await local.answer_later(path, body, request_id, tenant)
        finally:
            self._own -= 1
            version.leave()
