"""The ASGI application: its routes, and the layers around them."""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock import __version__
from penstock.config import ServerConfig
from penstock.frontend.answer import collect, stream
from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import APIError, ClientGone, as_api_error
from penstock.frontend.generation import Generation
from penstock.frontend.http.access import OPEN_PATHS, Access, Lifecycle
from penstock.frontend.http.asgi import ASGIApp, Receive, RequestInfo, Scope, Send, request_info, respond
from penstock.frontend.http.body import read_body
from penstock.frontend.http.buffers import BodyBuffers
from penstock.frontend.http.disconnect import while_connected
from penstock.frontend.limits import RequestLimits
from penstock.frontend.openai import GENERATE_ROUTES, TOKEN_ROUTES, encode_error, encode_model, encode_models
from penstock.frontend.served import ServedModel
from penstock.messages import EngineError
from penstock.observe.metrics import Metrics
from penstock.observe.model_metrics import ModelMetrics

_MODEL_PATH = "/v1/models/"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ENDED = "the engine has ended; the server's log has the reason"


def create_app(
    model: ServedModel, config: ServerConfig, metrics: Metrics, limits: RequestLimits | None = None
) -> Access:
    """Returns an ASGI app that serves one model.

    With an API key, every route requires it except health, version and metrics. Without one, a server on loopback
    accepts only loopback names in the Host header, so that no web page can reach it under a name of its own. The app's
    `lifecycle` counts requests and can refuse new ones. `metrics` must not have a model of this name yet.
    """
    limits = limits or RequestLimits.of(config)
    bodies = BodyBuffers(max(limits.max_buffered_bytes, limits.max_body_bytes), limits.retry_after)
    site = _RouteContext(model, limits, metrics.model(model.name, model.client), config.seed, bodies)
    lifecycle = Lifecycle()
    hot: dict[str, ASGIApp] = {path: _GenerateRoute(site, read) for path, read in GENERATE_ROUTES.items()}
    hot |= {path: _TokenRoute(site, answer) for path, answer in TOKEN_ROUTES.items()}
    rest = Starlette(routes=[*_Probes(model, lifecycle, metrics).routes(), *_post_only(hot)])
    rest.router.redirect_slashes = False
    for kind in (APIError, HTTPException, Exception):
        rest.add_exception_handler(kind, _answer_error)
    return Access(
        _Dispatch(hot, rest),
        lifecycle=lifecycle,
        metrics=metrics,
        limits=limits,
        api_keys=[config.api_key] if config.api_key else [],
        allowed_hosts=() if config.api_key or config.host.strip("[]") not in _LOOPBACK else _LOOPBACK,
        route_of=_templates(rest.router.routes),
        encode_error=encode_error,
        retry_after=model.client.queue.retry_after,
    )


class _Dispatch:
    """Sends POST requests for the hot routes straight there. Starlette's layers would add work to every chunk."""

    def __init__(self, hot: Mapping[str, ASGIApp], rest: ASGIApp) -> None:
        self._hot = hot
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._hot.get(scope["path"]) if scope["method"] == "POST" else None
        await (app or self._rest)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _RouteContext:
    """The objects that every route of a model uses."""

    model: ServedModel
    limits: RequestLimits
    metrics: ModelMetrics
    seed: int | None
    bodies: BodyBuffers

    def context(self, info: RequestInfo) -> RequestContext:
        return RequestContext(self.model, self.limits, secrets.token_hex(12), int(time.time()), info.tenant, self.seed)


class _GenerateRoute:
    """A route that generates. It is plain ASGI: bytes come in and bytes go out."""

    def __init__(self, site: _RouteContext, read: Callable[[bytes, RequestContext], Awaitable[Call]]) -> None:
        self._site = site
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, info = self._site, request_info(scope)
        if not site.model.client.healthy:
            raise EngineError(f"{_ENDED}; restart the server, then send this again")
        site.model.client.queue.check()
        held = site.bodies.hold()
        try:
            body = await read_body(scope, receive, site.limits, held)
            async with while_connected(receive):
                call = await self._read(body, site.context(info))
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


class _TokenRoute:
    """A route that only needs the tokenizer."""

    def __init__(self, site: _RouteContext, answer: Callable[[bytes, RequestContext], Awaitable[bytes]]) -> None:
        self._site = site
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info = request_info(scope)
        held = self._site.bodies.hold()
        try:
            body = await read_body(scope, receive, self._site.limits, held)
            answer = await self._answer(body, self._site.context(info))
        except ClientGone:
            info.client_gone = True
            return
        finally:
            held.release()
        await respond(send, 200, answer)


class _Probes:
    """Routes about the server itself. They never run inference."""

    def __init__(self, model: ServedModel, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._model = model
        self._lifecycle = lifecycle
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route("/livez", self._live),
            Route("/readyz", self._ready),
            Route("/health", self._ready),
            Route("/ping", self._ready, methods=["GET", "POST"]),
            Route("/version", self._show_version),
            Route("/metrics", self._show_metrics),
            Route("/v1/models", self._models),
            Route(_MODEL_PATH + "{id:path}", self._model_of_name),
        ]

    async def _live(self, request: Request) -> Response:
        healthy = self._model.client.healthy
        return _json({"status": "alive" if healthy else _ENDED}, 200 if healthy else 503)

    async def _ready(self, request: Request) -> Response:
        if self._lifecycle.draining:
            return _json({"status": "draining"}, 503)
        client = self._model.client
        if client.restarting:
            return _json({"status": "the engine is started again"}, 503)
        return _json({"status": "ready" if client.healthy else _ENDED}, 200 if client.healthy else 503)

    async def _show_version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _show_metrics(self, request: Request) -> Response:
        body, content_type = self._metrics.render(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    async def _models(self, request: Request) -> Response:
        return Response(encode_models(self._model), media_type="application/json")

    async def _model_of_name(self, request: Request) -> Response:
        return Response(encode_model(self._model, request.path_params["id"]), media_type="application/json")


def _post_only(hot: Mapping[str, ASGIApp]) -> list[Route]:
    """The hot routes again, so that Starlette refuses their other methods."""
    return [Route(path, app, methods=["POST"]) for path, app in hot.items()]


def _templates(routes: Sequence[BaseRoute]) -> Callable[[str], str]:
    """Returns a function from a path to its template. There are few templates, whatever paths clients send."""
    paths = frozenset(route.path for route in routes if isinstance(route, Route))

    def template(path: str) -> str:
        if path in paths:
            return path
        return _MODEL_PATH + "{id}" if path.startswith(_MODEL_PATH) else "other"

    return template


def _json(fields: dict[str, str], status: int = 200) -> Response:
    return Response(orjson.dumps(fields), status, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    """Encodes our errors, Starlette's and unexpected ones in the same shape."""
    if isinstance(error, HTTPException):
        error = _routing_error(request, error)
    known = as_api_error(error, 0)
    response = Response(encode_error(known), known.status, media_type="application/json")
    response.raw_headers += known.http_headers()
    return response


def _routing_error(request: Request, error: HTTPException) -> APIError:
    path = request.url.path[:100]
    message, code = str(error.detail), None
    match error.status_code:
        case 404:
            known = {route.path for route in request.app.routes if isinstance(route, Route)}
            here = ", ".join(sorted(path for path in known if path.encode() not in OPEN_PATHS and "{" not in path))
            code, message = "not_found", f"there is no route {path}; the routes are {here}"
        case 405:
            code, message = "method_not_allowed", f"{path} does not take {request.method}"
            if allowed := (error.headers or {}).get("Allow"):
                message += f"; send {allowed}"
    return APIError(error.status_code, message, code=code, headers=error.headers or {})
