"""Answers requests of a wire that do not come over HTTP: the lines of a batch."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from msgspec.structs import replace

from penstock.frontend.answer import collect
from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import INTERNAL_ERROR, APIError, as_api_error
from penstock.frontend.generation import PromptPart, Updates
from penstock.frontend.http.asgi import Answer
from penstock.frontend.jobs.lines import PATHS
from penstock.frontend.limits import RequestLimits
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.requests.pooling import check_generates
from penstock.frontend.tenants.account import RequestAccount
from penstock.frontend.tenants.office import TenantOffice
from penstock.frontend.versions.serving import Version
from penstock.frontend.wires import OPENAI, RESPONSES, Wire, WireRoute
from penstock.messages import EngineError

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
    """Answers requests of OpenAI's wire, each with the version of its model that new requests get."""

    def __init__(
        self,
        models: ModelRegistry,
        limits: RequestLimits,
        seed: int | None,
        priority: int | None = None,
        office: TenantOffice | None = None,
        version: Version | None = None,
    ) -> None:
        """Requests get `version`, or with None the one that new requests get. `seed` is for requests that have none;
        None: each gets a random one. `priority` replaces that of every request. `office` counts what tenants use."""
        self._models = models
        self._limits = limits
        self._seed = seed
        self._priority = priority
        self._office = office
        self._version = version
        self._own = 0  # requests being answered here

    def capacity(self) -> int:
        """How many requests keep the engines busy: as many as they run, and some that wait."""
        return sum(2 * served.model.client.info.max_num_seqs for served in self._models.all)

    def others(self) -> int:
        """How many requests of clients use the models. Those that only look, such as at a batch, are not counted."""
        return sum(served.version.requests for served in self._models.all) - self._own

    async def answer(self, path: str, body: bytes, request_id: str = "", tenant: str = "") -> Answer:
        """Returns the whole answer to a POST request for one of `PATHS`; for a request that fails, the error's answer.
        Waits while a reload holds requests back.

        Raises EngineError if the engine has ended.
        """
        made = await self._try(path, body, request_id, tenant)
        return _ROUTES[path][0].encode_error(made) if isinstance(made, APIError) else made

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[str, None]:
        """Yields the text of a request's only choice in pieces; the last may be empty. Closing it aborts the request.

        Raises APIError, RequestRejected and EngineError.
        """
        wire, route = _ROUTES[path]
        with self._context(route, secrets.token_hex(12), "", None) as context:
            generation = self._generation(await getattr(wire.package, route.function)(body, context))
            async with aclosing(generation.updates()) as updates:
                async for update in updates:
                    yield update.text

    @contextmanager
    def _context(
        self, route: WireRoute, request_id: str, tenant: str, account: RequestAccount | None
    ) -> Iterator[RequestContext]:
        """Yields the context of a request. The versions that it uses stay until the block ends."""
        entered: list[Version] = []

        async def enter(name: str | None) -> Version:
            version = await self._models.enter(name) if self._version is None else self._version.enter()
            entered.append(version)
            self._own += 1
            if route.kind == "generate":
                check_generates(version.model)
            return version

        try:
            yield RequestContext(
                models=self._models,
                enter=enter,
                limits=self._limits,
                id=request_id,
                account=account,
                created=int(time.time()),
                tenant=tenant,
                seed=self._seed,
            )
        finally:
            for version in entered:
                self._own -= 1
                version.leave()

    async def _try(self, path: str, body: bytes, request_id: str, tenant: str) -> Answer | APIError:
        wire, route = _ROUTES[path]
        answer_id = request_id or secrets.token_hex(12)
        account = None if self._office is None else self._office.open_batch(tenant, answer_id)
        status = 503
        try:
            with self._context(route, answer_id, tenant, account) as context:
                made = await self._answer(wire, route, body, context)
            status = 200
            return made
        except EngineError:
            raise
        except Exception as error:
            failure = as_api_error(error, self._limits.retry_after)
            if failure.code == INTERNAL_ERROR:
                _log.exception("a request failed")
            status = failure.status
            return failure
        finally:
            if account is not None and status in (429, 503):  # these are tried again under the same id
                account.drop()
            elif account is not None:
                account.close(route=path, status=status)

    async def _answer(self, wire: Wire, route: WireRoute, body: bytes, context: RequestContext) -> Answer:
        function = getattr(wire.package, route.function)
        if route.kind == "answer":
            return Answer(await function(body, context))
        call: Call = await function(body, context)
        return Answer(await collect(self._generation(call), call.codec))

    def _generation(self, call: Call) -> Updates:
        if self._priority is not None:
            call = call._replace(parts=tuple(map(self._prioritised, call.parts)))
        return call.generation(time.monotonic())

    async def answer_later(self, path: str, body: bytes, request_id: str, tenant: str = "") -> Answer:
        """Like `answer`, but waits while the queue is full, and while the engine is started again. A request that fails
        with 503, as for lack of memory, is tried a few times."""
        failures, wait = 0, RETRY_SECONDS
        while True:
            try:
                made = await self._try(path, body, request_id, tenant)
            except EngineError:
                if not self._models.healthy:
                    raise
            else:
                if isinstance(made, Answer):
                    return made
                failures += made.status == 503
                never = made.headers.get("x-should-retry") == "false"
                if never or made.status not in (429, 503) or failures >= MOST_FAILURES:
                    return _ROUTES[path][0].encode_error(made)
                wait = RETRY_SECONDS * 2**failures if made.status == 503 else RETRY_SECONDS
            await asyncio.sleep(wait)

    def _prioritised(self, part: PromptPart) -> PromptPart:
        return replace(part, request=replace(part.request, priority=self._priority))
