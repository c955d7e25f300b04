"""The ASGI application: its routes, and the layers around them."""

import asyncio
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.config import ServerConfig
from penstock.frontend.admin import AdminRoutes
from penstock.frontend.errors import APIError, as_api_error
from penstock.frontend.http.access import OPEN_PATHS, Access, Background, Lifecycle
from penstock.frontend.http.asgi import (
    LIVE_PATHS,
    READY_PATHS,
    Answer,
    ASGIApp,
    Receive,
    Scope,
    Send,
    header,
    request_info,
)
from penstock.frontend.http.buffers import answer_budget, body_budget
from penstock.frontend.http.keys import ApiKeys, Keys
from penstock.frontend.http.proxies import TrustedProxies
from penstock.frontend.limits import RequestLimits
from penstock.frontend.local import LocalRequests
from penstock.frontend.providers.fallbacks import Fallbacks
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.routes import ENGINE_ENDED, PathApp, Site, path_apps
from penstock.frontend.siblings import Siblings
from penstock.frontend.storage.database import Database, StorageOnly, open_storage
from penstock.frontend.store import ModelStore
from penstock.frontend.tenants.office import TenantOffice, open_office
from penstock.frontend.wires import ANTHROPIC, OPENAI, WIRES, Wire
from penstock.messages import LATER_PRIORITY
from penstock.observe.metrics import Metrics
from penstock.observe.tracing import Tracer
from penstock.version import __version__

_LONGEST_PATH = 1024  # characters of a path that is counted under its route's template, and in its wire's errors
_KEPT_PATHS = 1024  # whose templates are kept
_NEAREST = 3  # routes in the message of a 404
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def create_app(
    models: ModelRegistry,
    config: ServerConfig,
    metrics: Metrics,
    limits: RequestLimits | None = None,
    tracer: Tracer | None = None,
    store: ModelStore | None = None,
    siblings: Siblings | None = None,
    fallbacks: Fallbacks | None = None,
) -> Access:
    """Returns an ASGI app that serves these models.

    With an API key, every route requires it except health, version and metrics. Without one, a server on loopback
    accepts only loopback names in the Host header, so that no web page can reach it under a name of its own. The routes
    of `AdminRoutes` require the admin key or, if the server needs no key at all, loopback. The app's `lifecycle` counts
    requests and can refuse new ones. `metrics` has the series of these models. With a `tracer`, requests that generate
    are traced. With a `store`, clients may download and delete models. `siblings` are the server's other API processes.
    `fallbacks` are models that answer if others cannot.
    """
    limits = limits or RequestLimits.of(config)
    storage = open_storage(config, limits, None if siblings is None else siblings.storage_lock, metrics.storage)
    metrics.storage_room = None if storage is None else storage.room
    models.summaries.siblings = siblings
    bodies, unread = body_budget(limits), answer_budget(limits)
    lifecycle = Lifecycle()
    metrics.in_flight = lambda: lifecycle.requests
    office = open_office(config, siblings)
    keys = office.keys if office is not None else ApiKeys(config.api_key, config.api_key_file)
    background = _background(keys, limits, models, storage, siblings, config.seed, office)
    wake_batches = siblings.run_batches if siblings else background.wake if background else lambda: None
    site = Site(
        models, limits, config.seed, bodies, unread, tracer, store, storage, wake_batches, siblings, office, fallbacks
    )
    wires = [wire for wire in WIRES if wire.name in config.wires]
    paths = path_apps(site, wires)
    probes = _Probes(models, lifecycle, metrics if siblings is None else siblings, wires)
    admin = AdminRoutes(models, siblings, keys if siblings is None else None)
    rest = _starlette([*probes.routes(), *admin.routes()], paths)
    template = _templates(rest.router.routes)
    errors = _Errors(paths, template, limits.retry_after)
    errors.answer_for(rest)
    routes = [route for wire in wires for route in wire.routes]
    is_local = not keys.required and config.host.strip("[]") in _LOOPBACK
    return Access(
        _Dispatch(paths, rest),
        models=models,
        lifecycle=lifecycle,
        metrics=metrics,
        limits=limits,
        keys=keys,
        admin_key=config.admin_key,
        is_local=is_local and office is None,
        allowed_hosts=(*_LOOPBACK, *config.allowed_host) if is_local or config.allowed_host else (),
        route_of=template,
        encode_error=errors.encode,
        bodies=bodies,
        unread=unread,
        cors_origins=config.cors_origin,
        is_socket=frozenset(route.path.encode() for route in routes if route.kind == "socket").__contains__,
        is_page=_page_paths(route.path for route in routes if route.public),
        quiet=[_shown(route.path) for route in routes if not route.logged],
        retry_after=lambda: max(
            (served.model.client.queue.retry_after() for served in models.all), default=limits.retry_after
        ),
        background=background,
        logged_share=config.access_log,
        proxies=TrustedProxies(config.trusted_proxy),
        office=office,
    )


def _background(
    keys: Keys,
    limits: RequestLimits,
    models: ModelRegistry,
    storage: Database | None,
    siblings: Siblings | None,
    seed: int | None,
    office: TenantOffice | None,
) -> Background | None:
    """The batches, which the first API process runs. The other processes only close their storage at the end."""
    if storage is None:
        return None
    if siblings is not None and not siblings.first:
        return StorageOnly(storage)
    from penstock.frontend.jobs.places import BatchPlaces
    from penstock.frontend.jobs.runner import BatchRunner

    local = LocalRequests(models, limits, seed, priority=limits.max_priority + LATER_PRIORITY, office=office)
    places = BatchPlaces(local.capacity, local.others)
    fresh = siblings is None or siblings.fresh
    return BatchRunner(storage, keys, local, limits, places, fresh)


def _starlette(routes: Sequence[Route], paths: Mapping[str, PathApp]) -> Starlette:
    """An app of `routes` and of the wires' routes, without redirects."""
    of_wires = [Route(path, app, methods=sorted(app.methods)) for path, app in paths.items()]
    starlette = Starlette(routes=[*routes, *of_wires])
    starlette.router.redirect_slashes = False
    return starlette


class _Errors:
    """Errors as answers, each in the format of the wire that its path belongs to.

    A path that is not here belongs to Anthropic's wire if a header of the client says so, else to the wire of most
    paths that begin alike. Without any, errors are OpenAI's.
    """

    def __init__(self, paths: Mapping[str, PathApp], template: Callable[[str], str], retry_after: int) -> None:
        self._paths = {_shown(path): app for path, app in paths.items()}
        self._template = template
        self._retry_after = retry_after

    def answer_for(self, app: Starlette) -> None:
        """Answers all errors of `app`."""
        for kind in (APIError, HTTPException, Exception):
            app.add_exception_handler(kind, self._answer)

    def encode(self, error: APIError, scope: Scope | None) -> Answer:
        path = None if scope is None else self._paths.get(self._template(scope["path"]))
        if scope is None:
            wire = OPENAI
        else:
            wire = self._wire_of_unknown(scope) if path is None else path.wire(scope)
        return wire.encode_error(error)

    def _wire_of_unknown(self, scope: Scope) -> Wire:
        if header(scope, b"anthropic-version") is not None:
            return ANTHROPIC
        first = scope["path"][:_LONGEST_PATH].split("/")[1:2]
        alike = [app for path, app in self._paths.items() if path.split("/")[1:2] == first]
        wires = Counter(wire for app in alike for wire in app.wires)
        return wires.most_common(1)[0][0] if wires else OPENAI

    async def _answer(self, request: Request, error: Exception) -> Response:
        error = _routing_error(request, error) if isinstance(error, HTTPException) else error
        known = as_api_error(error, self._retry_after)
        request_info(request.scope).error = known.code or str(known.status)
        encoded = self.encode(known, request.scope)
        response = Response(encoded.body, encoded.status, media_type="application/json")
        response.raw_headers += known.http_headers()
        return response


class _Dispatch:
    """Sends WebSockets, and POST requests of fixed paths, straight to their routes.

    Starlette's layers would add work to every chunk.
    """

    def __init__(self, paths: Mapping[str, PathApp], rest: ASGIApp) -> None:
        self._paths = paths
        self._posts = {path: app for path, app in paths.items() if "POST" in app.methods and "{" not in path}
        self._infer = paths.get("/v2/models/{model:path}/infer")
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # of a path that takes them, else it would not be one
            await self._paths[scope["path"]](scope, receive, send)
            return
        path = scope["path"]
        app = self._posts.get(path) if scope["method"] == "POST" else None
        if app is None and self._infer is not None and (model := _inferred(scope["method"], path)):
            scope["path_params"] = {"model": model}
            app = self._infer
        await (app or self._rest)(scope, receive, send)


def _inferred(method: str, path: str) -> str:
    """The model of a request to infer without a version; "" for other requests."""
    if method != "POST" or not path.startswith("/v2/models/") or not path.endswith("/infer") or "/versions/" in path:
        return ""
    return path[len("/v2/models/") : -len("/infer")]


class _Probes:
    """Routes about the server itself. They never run inference."""

    def __init__(
        self, models: ModelRegistry, lifecycle: Lifecycle, metrics: Metrics | Siblings, wires: Sequence[Wire]
    ) -> None:
        self._models = models
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._wires = wires

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self._live) for path in LIVE_PATHS),
            *(Route(path, self._ready, methods=["GET", "POST"] if path == "/ping" else None) for path in READY_PATHS),
            Route("/version", self._show_version),
            Route("/metrics", self._show_metrics),
            Route("/openapi.json", self._show_openapi),
        ]

    async def _live(self, request: Request) -> Response:
        healthy = self._models.healthy
        return _json({"status": "alive" if healthy else ENGINE_ENDED}, 200 if healthy else 503)

    async def _ready(self, request: Request) -> Response:
        if self._lifecycle.draining:
            return _json({"status": "draining"}, 503)
        if self._lifecycle.stopping:
            return _json({"status": "stopping"}, 503)
        states = [served.model.client.state.status for served in self._models.all]
        if "restarting" in states:
            return _json({"status": "the engine is started again"}, 503)
        if any(served.holding for served in self._models.all):
            return _json({"status": "the model is reloaded"}, 503)
        if "ended" in states:
            return _json({"status": ENGINE_ENDED}, 503)
        if not isinstance(self._metrics, Metrics) and self._metrics.starting:
            return _json({"status": "another API process is started"}, 503)
        # A request wakes an engine that is asleep.
        return _json({"status": "asleep" if set(states) == {"asleep"} else "ready"})

    async def _show_version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _show_metrics(self, request: Request) -> Response:
        accept, metrics = request.headers.get("accept"), self._metrics
        if isinstance(metrics, Metrics):
            body, content_type = await asyncio.to_thread(metrics.scrape(accept))
        else:
            body, content_type = await metrics.metrics(accept)
        return Response(body, headers={"content-type": content_type})

    async def _show_openapi(self, request: Request) -> Response:
        from penstock.frontend.openapi import document  # needs the packages of all wires

        name = self._models.default.model.name if self._models.all else "MODEL"
        return Response(document(tuple(self._wires), name), media_type="application/json")


def _shown(path: str) -> str:
    """A route's path for people: without the types of its parameters."""
    return re.sub(r":\w+}", "}", path)


def _page_paths(paths: Iterable[str]) -> Callable[[bytes], bool]:
    """Returns a function that says whether a raw path is one of `paths`, whose parameters are plain file names."""
    patterns = "|".join(re.sub(r"\\{\w+\\}", r"[A-Za-z0-9._-]+", re.escape(path)) for path in paths)
    found = re.compile((patterns or "(?!)").encode()).fullmatch
    return lambda path: found(path) is not None


def _templates(routes: Sequence[BaseRoute]) -> Callable[[str], str]:
    """Returns a function from a path to its template. The number of templates is fixed, for any paths that clients
    send. The templates of recent paths are kept: else the patterns are tried one after the other."""
    fixed = frozenset(route.path for route in routes if isinstance(route, Route) and "{" not in route.path)
    patterns = [
        (route.path_regex, _shown(route.path)) for route in routes if isinstance(route, Route) and "{" in route.path
    ]

    @lru_cache(_KEPT_PATHS)
    def known(path: str) -> str:
        if path in fixed:
            return path
        return next((shown for pattern, shown in patterns if pattern.match(path)), "other")

    def template(path: str) -> str:
        # This is before the key is checked: long paths take long, and would stay in memory.
        return "other" if len(path) > _LONGEST_PATH else known(path)

    return template


def _json(fields: dict[str, str], status: int = 200) -> Response:
    return Response(orjson.dumps(fields), status, media_type="application/json")


def _routing_error(request: Request, error: HTTPException) -> APIError:
    path = request.url.path[:100]
    message, code = str(error.detail), None
    match error.status_code:
        case 404:
            known = {route.path for route in request.app.routes if isinstance(route, Route)}
            shown = sorted(other for other in known if other.encode() not in OPEN_PATHS and "{" not in other)
            below = [other for other in shown if other.startswith(path.rstrip("/") + "/") and path != "/"]
            near = below[:_NEAREST] or difflib.get_close_matches(path, shown, _NEAREST)
            meant = f"; did you mean {' or '.join(near)}?" if near else ";"
            code, message = "not_found", f"there is no route {path}{meant} GET /openapi.json lists all routes"
        case 405:
            code, message = "method_not_allowed", f"{path} does not take {request.method}"
            if allowed := (error.headers or {}).get("Allow"):
                message += f"; send {allowed}"
    return APIError(error.status_code, message, code=code, headers=error.headers or {})
