"""The routes of the wires, as ASGI apps: they read the body, call the wire's function and send what it answers."""

import secrets
import time
from dataclasses import dataclass
from typing import cast

from penstock.frontend.answer import collect, stream
from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import ClientGone
from penstock.frontend.generation import Generation
from penstock.frontend.http.asgi import ASGIApp, Receive, Scope, Send, request_info, respond
from penstock.frontend.http.body import read_body
from penstock.frontend.http.buffers import BodyBuffers
from penstock.frontend.http.disconnect import while_connected
from penstock.frontend.limits import RequestLimits
from penstock.frontend.served import ServedModel
from penstock.frontend.wires import Answer, Wire, WireRoute
from penstock.messages import EngineError
from penstock.observe.model_metrics import ModelMetrics

ENGINE_ENDED = "the engine has ended; the server's log has the reason"


@dataclass(frozen=True, slots=True)
class Site:
    """The objects that every route uses."""

    model: ServedModel
    limits: RequestLimits
    metrics: ModelMetrics
    seed: int | None
    bodies: BodyBuffers

    def context(self, scope: Scope) -> RequestContext:
        return RequestContext(
            self.model,
            self.limits,
            id=secrets.token_hex(12),
            created=int(time.time()),
            tenant=request_info(scope).tenant,
            path=scope.get("path_params", {}),
            headers=scope["headers"],
            start=request_info(scope).start,
            seed=self.seed,
        )


def route_app(site: Site, wire: Wire, route: WireRoute) -> ASGIApp:
    """Returns the app of a route."""
    match route.kind:
        case "generate":
            return _GenerateRoute(site, wire, route)
        case "answer":
            return _AnswerRoute(site, wire, route)
        case "raw":
            return _RawRoute(site, wire, route)


class _Route:
    def __init__(self, site: Site, wire: Wire, route: WireRoute) -> None:
        self._site = site
        self._wire = wire
        self._function = route.function
        self._has_body = route.method not in ("GET", "DELETE")


class _GenerateRoute(_Route):
    """A route that generates. It is plain ASGI: bytes come in and bytes go out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, info = self._site, request_info(scope)
        read = getattr(self._wire.package, self._function)
        if not site.model.client.healthy:
            raise EngineError(f"{ENGINE_ENDED}; restart the server, then send this again")
        site.model.client.queue.check()
        held = site.bodies.hold()
        try:
            body = await read_body(scope, receive, site.limits, held)
            async with while_connected(receive):
                call = cast(Call, await read(body, site.context(scope)))
                del body
                held.release()
                generation = Generation(site.model, call.parts, site.metrics, call.operation, info.start)
                if call.stream:
                    await stream(generation, call.codec, send, site.limits.retry_after)
                else:
                    await collect(generation, call.codec, send)
        except ClientGone:
            info.client_gone = True
        finally:
            held.release()


class _AnswerRoute(_Route):
    """A route that gives one answer, without streaming."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = getattr(self._wire.package, self._function)
        held = self._site.bodies.hold()
        try:
            body = await read_body(scope, receive, self._site.limits, held) if self._has_body else b""
            made: bytes | Answer = await answer(body, self._site.context(scope))
        except ClientGone:
            request_info(scope).client_gone = True
            return
        finally:
            held.release()
        if isinstance(made, bytes):
            made = Answer(made)
        headers = [(name.encode(), value.encode()) for name, value in made.headers.items()]
        await respond(send, made.status, made.body, made.content_type, headers)


class _RawRoute(_Route):
    """A route that reads and sends by itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await getattr(self._wire.package, self._function)(scope, receive, send, self._site.context(scope))
