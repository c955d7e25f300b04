"""Turns the routes of the wires into ASGI apps. A wire is one API that the server speaks, such as OpenAI's.

An app reads the body, calls the function that the wire names for the route, and sends what the function returns.
"""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from penstock.frontend.answer import collect, stream
from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import APIError, ClientGone, as_api_error
from penstock.frontend.http.asgi import (
    Answer,
    ASGIApp,
    Receive,
    RequestInfo,
    Scope,
    Send,
    StreamedAnswer,
    header,
    request_info,
    respond,
    trace_headers,
)
from penstock.frontend.http.body import read_body, read_upload
from penstock.frontend.http.buffers import ByteBudget, HeldBytes
from penstock.frontend.http.disconnect import WhileConnected
from penstock.frontend.limits import RequestLimits
from penstock.frontend.providers.fallbacks import Fallbacks, Trial
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.requests.deadlines import deadlines
from penstock.frontend.requests.pooling import check_generates
from penstock.frontend.served import ServedModel
from penstock.frontend.siblings import Siblings
from penstock.frontend.sockets import SocketSession
from penstock.frontend.storage.database import Database
from penstock.frontend.store import ModelStore
from penstock.frontend.tenants.office import TenantOffice
from penstock.frontend.versions.serving import Version
from penstock.frontend.wires import Wire, WireRoute
from penstock.messages import EngineError
from penstock.observe.tracing import Tracer

_log = logging.getLogger("penstock.server")
_SAFE_METHODS = ("GET", "HEAD")  # RFC 9110: they change nothing
_UPLOAD_BYTES = 1 << 20  # most bytes that an upload buffers
ENGINE_ENDED = "the engine has ended; the server's log has the reason"


@dataclass(frozen=True, slots=True)
class Site:
    models: ModelRegistry
    limits: RequestLimits
    seed: int | None
    bodies: ByteBudget
    unread: ByteBudget  # of large answers
    tracer: Tracer | None = None
    store: ModelStore | None = None  # lets clients download and delete models; None: they may not
    storage: Database | None = None
    wake_batches: Callable[[], None] = lambda: None
    siblings: Siblings | None = None
    office: TenantOffice | None = None  # None: the server has no tenants
    fallbacks: Fallbacks | None = None  # None: only the model that a request names answers it

    @contextmanager
    def context(
        self,
        scope: Scope,
        wire: Wire,
        held: HeldBytes | None = None,
        check: Callable[[ServedModel], None] = lambda model: None,
        trial: Trial | None = None,
    ) -> Iterator[RequestContext]:
        """Yields what a wire's function needs besides the body, with a new id for its answer. The versions that the
        request uses stay until the block ends. Call it after the body is read.

        A GET request gets the current version at once: it does not wait for a reload, and does not keep an engine
        awake. `check` raises the error for a model that cannot do what the route does. `trial` chooses the model.
        """
        entered: list[Version] = []
        made: list[RequestContext] = []

        async def enter(name: str | None) -> Version:
            if scope["method"] in _SAFE_METHODS:
                return self.models.find(name).version
            if trial is not None:
                name = trial.model_for(name)
            version = await _enter(self.models, name, made[0])
            entered.append(version)
            check(version.model)
            return version

        info = request_info(scope)
        info.answer_id = secrets.token_hex(12)
        if self.office is not None and info.grant is not None:
            info.account = self.office.open(info.grant, wire.name, info.answer_id, info.headers)
        context = RequestContext(
            models=self.models,
            enter=enter,
            limits=self.limits,
            id=info.answer_id,
            created=int(time.time()),
            tenant=info.tenant,
            account=info.account,
            path=scope.get("path_params", {}),
            headers=scope["headers"],
            seed=self.seed,
            start=info.start,
            store=self.store,
            query=scope.get("query_string", b""),
            storage=self.storage,
            wake_batches=self.wake_batches,
            siblings=self.siblings,
            held=held,
            unread=info.unread,
            admin=info.admin,
            compares=True,
            show=partial(setattr, info, "shown"),
        )
        made.append(context)
        try:
            yield context
        finally:
            made.clear()  # else the context and `enter` would have each other
            for version in entered:
                version.leave()


async def _enter(models: ModelRegistry, name: str | None, context: RequestContext) -> Version:
    """Returns the version for a request, which must leave it. Raises DeadlineExceeded if a reload takes longer than the
    request's timeout, and APIError 503 if there is no room for an engine until then."""
    if not models.must_wait(name):
        return await models.enter(name, context.session_key)
    due = min((each for each in deadlines(context, None, None) if each is not None), default=None)
    return await models.enter_within(name, context.session_key, None if due is None else due - time.monotonic())


class _MountedRoute(NamedTuple):
    route: WireRoute
    wire: Wire
    app: ASGIApp


class PathApp:
    """The ASGI app of one path. It chooses a route by the request's method and by the routes' `when` conditions."""

    def __init__(self) -> None:
        self._routes: list[_MountedRoute] = []

    @property
    def methods(self) -> set[str]:
        return {mounted.route.method for mounted in self._routes}

    @property
    def wires(self) -> set[Wire]:
        return {mounted.wire for mounted in self._routes}

    def wire(self, scope: Scope) -> Wire:
        """Returns the wire of a request, for its errors. If no route matches, returns the path's last wire."""
        return (self._choose(scope) or self._routes[-1]).wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chosen = self._choose(scope)
        if chosen is None:
            raise APIError(404, f"there is no route {scope['path'][:100]} for this request", code="not_found")
        await chosen.app(scope, receive, send)

    def add(self, route: WireRoute, wire: Wire, app: ASGIApp) -> None:
        self._routes.append(_MountedRoute(route, wire, app))
        self._routes.sort(key=lambda mounted: mounted.route.when is None)

    def _choose(self, scope: Scope) -> _MountedRoute | None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        for mounted in self._routes:
            if mounted.route.method == method and (mounted.route.when is None or mounted.route.when(scope)):
                return mounted
        return None


def path_apps(site: Site, wires: Iterable[Wire]) -> dict[str, PathApp]:
    """Returns one app for each path of these wires, by path."""
    apps: dict[str, PathApp] = {}
    for wire in wires:
        for route in wire.routes:
            apps.setdefault(route.path, PathApp()).add(route, wire, route_app(site, wire, route))
    return apps


def route_app(site: Site, wire: Wire, route: WireRoute) -> ASGIApp:
    match route.kind:
        case "generate":
            return _GenerateRoute(site, wire, route)
        case "answer":
            return _AnswerRoute(site, wire, route)
        case "upload":
            return _UploadRoute(site, wire, route)
        case "socket":
            return _SocketRoute(site, wire, route)


class _Route:
    def __init__(self, site: Site, wire: Wire, route: WireRoute) -> None:
        self._site = site
        self._wire = wire
        self._function = route.function
        self._path = route.path
        self._binary = route.binary


class _GenerateRoute(_Route):
    """A route that generates text. Its function parses the body into a Call, whose output is streamed or collected. A
    one-shot model answers itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, info = self._site, request_info(scope)
        read = getattr(self._wire.package, self._function)
        only = site.models.only  # if there are several models, the body says which one it is for
        if only is not None:
            if not only.healthy:
                raise EngineError(f"{ENGINE_ENDED}; restart the server, then send this again")
            check_generates(only.model)
        if site.tracer is not None:
            name = site.models.default.model.name if site.models.all else ""
            info.trace = site.tracer.begin(trace_headers(scope), info.start, name)
        if only is not None:
            only.model.client.queue.check()
        held = site.bodies.hold()
        try:
            body = await read_body(scope, receive, site.limits, held, any_type=self._wire.any_type, binary=self._binary)
            trial = None if site.fallbacks is None else Trial(site.fallbacks, body)
            with WhileConnected(receive):
                while True:
                    try:
                        with site.context(scope, self._wire, held, check_generates, trial) as context:
                            call: Call | Answer | StreamedAnswer = await read(body, context)
                            if trial is None or trial.last:
                                body = b""
                                held.release()
                            if isinstance(call, StreamedAnswer):
                                trial = None
                                await _send_chunks(call, send)
                                return
                            made = call if isinstance(call, Answer) else await self._generate(call, info, send, trial)
                        break
                    except Exception as error:
                        if trial is None or not trial.goes_on(error):
                            raise
                        if info.account is not None:
                            code = as_api_error(error, site.limits.retry_after).code or ""
                            info.account.leave(request_id=info.request_id, route=self._path, error=code)
                # The version is free now: a reload does not wait for a client that reads slowly.
                if made is not None:
                    await _send_answer(made, info, send)
        except ClientGone:
            info.client_gone = True
        finally:
            held.release()

    async def _generate(self, call: Call, info: RequestInfo, send: Send, trial: Trial | None) -> Answer | None:
        """Returns the whole answer; None if it was streamed."""
        begin = call.generation if trial is None else partial(trial.generation, call)
        generation = begin(info.start, info.request_id, info.trace)
        headers = {**call.headers, **generation.usage.left_out.headers}
        if info.account is not None:
            generation.usage.price = info.account.shown_price
            info.account.answered = generation.usage
        try:
            if call.stream:
                silent = None if trial is None else trial.silent_seconds
                after = self._site.limits.retry_after
                await stream(generation, call.codec, send, after, call.keep, headers, silent)
                return None
            return Answer(await collect(generation, call.codec, call.keep, info.unread), headers=headers)
        finally:
            info.shown = generation.shown()


class _AnswerRoute(_Route):
    """A route whose function makes the answer itself. Large answers are sent in chunks."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, answer = self._site, getattr(self._wire.package, self._function)
        held = site.bodies.hold()
        try:
            body = b""
            if _has_body(scope):
                body = await read_body(scope, receive, site.limits, held, any_type=self._wire.any_type)
            with WhileConnected(receive):
                with site.context(scope, self._wire, held) as context:
                    made: bytes | Answer | StreamedAnswer = await answer(body, context)
                if isinstance(made, StreamedAnswer):
                    if not made.held:
                        held.release()
                    await _send_chunks(made, send)
                    return
        except ClientGone:
            request_info(scope).client_gone = True
            return
        finally:
            held.release()
        if isinstance(made, bytes):
            made = Answer(made)
        await _send_answer(made, request_info(scope), send)


class _SocketRoute(_Route):
    """A route for WebSockets. Each message is a request that goes through the whole app to a route of another kind."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            message = f"{scope['path']} is for WebSockets; open one with a WebSocket client"
            raise APIError(426, message, code="upgrade_required", headers={"upgrade": "websocket"})
        codec, site = getattr(self._wire.package, self._function)(), self._site
        encode_error = self._wire.encode_error
        await SocketSession(scope, send, codec, site.limits, site.bodies, site.unread, encode_error).run(receive)


class _UploadRoute(_Route):
    """A route for large bodies, such as files. Its function reads the body in chunks while it arrives."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        take, site = getattr(self._wire.package, self._function), self._site
        held = site.bodies.hold()
        try:
            held.add(_UPLOAD_BYTES)
            async with read_upload(scope, receive, site.limits) as chunks:
                with site.context(scope, self._wire) as context:
                    made: bytes = await take(chunks, context)
        except ClientGone:
            request_info(scope).client_gone = True
        else:
            await respond(send, 200, made)
        finally:
            held.release()


async def _send_chunks(answer: StreamedAnswer, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    headers.append((b"content-type", answer.content_type))
    if answer.size is not None:
        headers.append((b"content-length", b"%d" % answer.size))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    left = answer.size
    async with aclosing(cast(AsyncGenerator[bytes, None], answer.chunks)) as chunks:
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            left = None if left is None else left - len(chunk)
    if left:  # without a last message, the connection is closed: so the client sees that bytes are missing
        _log.warning("%d bytes of an answer were not sent: its file was deleted meanwhile", left)
        return
    await send({"type": "http.response.body", "body": b""})


async def _send_answer(answer: Answer, info: RequestInfo, send: Send) -> None:
    """Sends an answer. Raises APIError 429 before anything is sent if the answer does not fit in the budget."""
    info.unread.become(len(answer.body))
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    await respond(send, answer.status, answer.body, answer.content_type, headers)


def _has_body(scope: Scope) -> bool:
    """Returns True if the request has a body to read; False for GET and HEAD, whose bodies no route uses.

    Some GET routes need no API key. If their bodies were read, anyone could use up the budget for bodies.
    """
    if scope["method"] in _SAFE_METHODS:
        return False
    return header(scope, b"content-length") not in (None, b"0") or header(scope, b"transfer-encoding") is not None
