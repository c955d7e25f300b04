"""The outermost layer: admits or refuses requests, labels answers with a request id, counts and logs them."""

import contextlib
import hmac
import logging
import random
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Protocol

from penstock.frontend.errors import INTERNAL_ERROR, APIError, as_api_error
from penstock.frontend.http.asgi import (
    LIVE_PATHS,
    READY_PATHS,
    Answer,
    ASGIApp,
    Headers,
    Receive,
    RequestInfo,
    Scope,
    Send,
    handshake_send,
    header,
    request_info,
    respond,
    shown_path,
)
from penstock.frontend.http.buffers import ByteBudget, HeldBytes
from penstock.frontend.http.cors import Cors, answer_preflight, check_site, is_preflight
from penstock.frontend.http.keys import Holder, Keys, key_digest
from penstock.frontend.http.proxies import TrustedProxies, address_of
from penstock.frontend.http.response import ResponseTracker
from penstock.frontend.http.starts import RequestStarts
from penstock.frontend.limits import RequestLimits
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.tenants.digests import digesting
from penstock.frontend.tenants.grant import Grant
from penstock.frontend.tenants.office import TenantOffice
from penstock.observe.metrics import Metrics
from penstock.tasks import InFlight

OPEN_PATHS = frozenset(path.encode() for path in (*LIVE_PATHS, *READY_PATHS, "/version", "/metrics"))
ADMIN_PATHS = frozenset((b"/reload", b"/sleep", b"/wake_up", b"/is_sleeping", b"/reset_prefix_cache"))
# Of routes that only a server with a repository has: they load and unload models, and register shared memory.
ADMIN_PREFIXES = (b"/v2/repository/models/", b"/v2/systemsharedmemory/")

KEY_PROTOCOL = "openai-insecure-api-key."  # begins a WebSocket's subprotocol that holds a key, as for OpenAI's clients

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
_log = logging.getLogger("penstock.access")
_CLIENT_GONE = 499  # the client disconnected; nginx's code, for metrics and logs, never sent
_ERRORS = 400  # the least status of an error
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")


class Lifecycle(InFlight):
    """Says whether new requests are accepted, and counts those being answered."""

    def __init__(self) -> None:
        super().__init__()
        self.stopping = False  # the server is not ready, but accepts requests until it drains
        self.draining = False


class Background(Protocol):
    """Work beside the requests."""

    async def run(self) -> None:
        """Runs until it is cancelled."""

    def wake(self) -> None:
        """Called when there may be something to do."""

    async def close(self) -> None:
        """Called when no request is left."""


class Access:
    """ASGI middleware that admits requests. It checks the raw path, before it is decoded, and denies by default."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        models: ModelRegistry,
        lifecycle: Lifecycle,
        metrics: Metrics,
        limits: RequestLimits,
        keys: Keys,
        admin_key: str | None,
        is_local: bool,
        allowed_hosts: Sequence[str],
        route_of: Callable[[str], str],
        encode_error: Callable[[APIError, Scope | None], Answer],
        retry_after: Callable[[], int],
        bodies: ByteBudget,
        unread: ByteBudget,
        cors_origins: Sequence[str],
        is_socket: Callable[[bytes], bool],
        is_page: Callable[[bytes], bool],
        quiet: Collection[str],
        background: Background | None,
        logged_share: float,
        proxies: TrustedProxies,
        office: TenantOffice | None = None,
    ) -> None:
        """`is_local`: only this machine reaches the server, and it needs no API key. `allowed_hosts` are the accepted
        names in the Host header, without port; empty: any name.

        `route_of` returns the template of a path, `encode_error` the error answer to a request, or to bytes that are
        not a request, `retry_after` the seconds after which a request that is one too many may come again.
        `bodies` is the budget of bodies, `unread` that of large answers. Pages of `cors_origins` may
        send requests. `is_socket` says whether a raw path takes WebSockets, and `is_page` whether it is of a file that
        everyone may read. Successful requests to routes in `quiet` are not logged. `background` runs as long as the app
        is served. `logged_share` of the requests without an error status are logged, with
        the client's address as `proxies` finds it. `office` records requests if the server has tenants.
        """
        self.models = models
        self.lifecycle = lifecycle
        self.bodies = bodies
        self.unread = unread
        self.is_socket = is_socket
        self.sockets = 0  # WebSockets and gRPC streams that are open
        self._starts = RequestStarts()
        self._app = app
        self._metrics = metrics
        self.limits = limits
        self.keys = keys
        self._is_local = is_local
        self._admin = None if admin_key is None else key_digest(admin_key.encode())
        self._hosts = frozenset(host.lower().encode() for host in allowed_hosts)
        self._cors = Cors(cors_origins)
        self._is_page = is_page
        self._quiet = frozenset(quiet)
        self._logged_share = logged_share
        self._proxies = proxies
        self.office = office
        self._route_of = route_of
        self._encode_error = encode_error
        self._retry_after = retry_after
        self.background = background

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            scope.update({"method": "GET", "penstock.app": self})
            send = handshake_send(send)
        elif scope["type"] != "http":
            raise RuntimeError(f"this server supports only HTTP and WebSockets, not {scope['type']}")
        request_id = _request_id(header(scope, b"x-request-id"))
        inner: HeldBytes | None = scope.get("penstock.unread")
        unread = inner or self.unread.hold()
        scope.setdefault("penstock.gone", _connected)
        info = RequestInfo(request_id.decode(), time.monotonic(), unread)
        scope["penstock.request"] = info
        origin = self._cors.allowed(scope)
        ids = ((b"x-request-id", request_id), (b"request-id", request_id))  # the second: Anthropic's
        info.headers += (*ids, *self._cors.headers(origin))
        before_end = None if self.office is None else partial(self._record, scope, info)
        answer = ResponseTracker(send, info.headers, unread, lasting=inner is not None, before_end=before_end)
        send = answer.send
        if self.office is not None and self.office.books.audits:
            receive, send = digesting(info, receive, send)
        try:
            await self._admit(scope, receive, send, origin)
        except Exception as error:
            failure = as_api_error(error, self.limits.retry_after)
            info.error = failure.code or str(failure.status)
            if failure.code == INTERNAL_ERROR:
                _log.exception("a request failed", extra={"fields": {"request_id": info.request_id}})
            if answer.status is None:
                encoded = self._encode_error(failure, scope)
                await respond(send, encoded.status, encoded.body, headers=failure.http_headers())
            elif not answer.complete:
                raise  # too late for an error answer: uvicorn closes the connection
            del failure  # it has this frame, so both, and the body with them, would stay until Python looks for cycles
        finally:
            del scope["penstock.gone"]  # it has the connection's request, which has the scope
            if inner is None:
                unread.release()
            self._end(scope, info, answer.status)

    async def _admit(self, scope: Scope, receive: Receive, send: Send, origin: bytes | None) -> None:
        """`origin` is that of the page that sends the request, if it is an allowed one."""
        if (refused := scope.get("penstock.refused")) is not None:  # the connection's error for this request
            raise refused
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        if origin is not None and is_preflight(scope):
            await answer_preflight(scope, send)
        elif raw_path in OPEN_PATHS:
            await self._app(scope, receive, send)
        else:
            self._check_host(header(scope, b"host"))
            if scope["method"] in ("GET", "HEAD") and self._is_page(raw_path):  # a POST to / generates
                await self._app(scope, receive, send)
                return
            is_socket = scope["type"] == "websocket"
            is_admin = raw_path in ADMIN_PATHS or (
                self.models.tensors is not None and raw_path.startswith(ADMIN_PREFIXES)
            )
            # Browsers let every page open a WebSocket. Pages of other origins are no operators.
            if (origin is None and (is_socket or not self.keys.required)) or is_admin:
                check_site(scope)
            if is_admin:
                info = request_info(scope)
                info.grant = self._check_admin(bearer(scope))
                info.admin = True
                await self._app(scope, receive, send)
                return
            holder = self._holder(bearer(scope))
            info = request_info(scope)
            info.tenant, info.key, info.grant = holder
            self._check_open()
            await (self._socket if is_socket else self._in_flight)(scope, receive, send)

    def _check_open(self) -> None:
        if self.lifecycle.draining:
            raise APIError(
                503,
                "the server is shutting down; send this to another server",
                code="draining",
                retry_after=self.limits.retry_after,
            )

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The requests on a WebSocket are in flight, not the socket itself."""
        with self.open_socket():
            await self._app(scope, receive, send)

    @contextlib.contextmanager
    def open_socket(self) -> Iterator[None]:
        """Counts a WebSocket or a gRPC stream as long as the block runs. Raises APIError 429."""
        most = self.limits.max_sockets
        if self.sockets >= most:
            message = f"{most} WebSockets and gRPC streams are open, the limit; close one, or try again later"
            raise APIError(429, message, code="too_many_sockets", retry_after=self.limits.retry_after)
        self.sockets += 1
        try:
            yield
        finally:
            self.sockets -= 1

    def check_key(self, headers: Headers) -> None:
        """Raises APIError 401 if requests with these headers have no valid key."""
        self._holder(bearer({"headers": headers}))

    async def _in_flight(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted():
            if await self._starts.next(scope["penstock.gone"], request_info(scope).tenant):
                await self._app(scope, receive, send)
            else:
                request_info(scope).client_gone = True

    def _counted(self) -> Lifecycle:
        """Returns what counts a request in flight as long as a block runs with it. Raises APIError 429."""
        if self.lifecycle.requests >= self.limits.max_in_flight:
            raise APIError(
                429,
                f"{self.limits.max_in_flight} requests are in flight, the limit (--max-in-flight); try again later",
                code="too_many_requests",
                retry_after=self._retry_after(),
            )
        return self.lifecycle

    def in_flight(self) -> Lifecycle:
        """The same for a request that does not run through the app. Raises APIError 429 or 503."""
        self._check_open()
        return self._counted()

    def count(self, route: str, status: int) -> None:
        """Counts the answer to such a request."""
        self._metrics.http_request("POST", route, status)

    def _check_host(self, host: bytes | None) -> None:
        """Refuses other names in the Host header, such as a web page's name that was rebound to this host."""
        if not self._hosts:
            return
        name = re.sub(rb":\d*$", b"", (host or b"").lower())
        if name.removeprefix(b"[").removesuffix(b"]") not in self._hosts:
            known = ", ".join(sorted(name.decode() for name in self._hosts))
            why = "this server listens on loopback without an API key" if self._is_local else "--allowed-host says so"
            message = f"the Host header must be one of {known}, as {why}; use one of these names, or add --allowed-host"
            raise APIError(403, message, code="host_refused")

    def _check_admin(self, key: bytes) -> Grant | None:
        """Returns what a tenant's key allows, if it may use the operator's routes; None for the admin key. A server on
        loopback that needs no key needs none here either. Raises APIError 401 or 403."""
        if key and (found := self.keys.holder(key)) is not None and found.admin:
            return found.grant
        if self._admin is None and not self._is_local:
            raise APIError(
                403,
                "this route is for the operator: start the server with --admin-key (PENSTOCK_ADMIN_KEY) and send that, "
                "or a key of penstock tenants add --admin",
                code="admin_key_required",
            )
        if self._admin is not None and not hmac.compare_digest(key_digest(key), self._admin):
            raise APIError(401, "no valid admin key; send it as Authorization: Bearer KEY", code="invalid_admin_key")
        return None

    def _holder(self, key: bytes) -> Holder:
        """Raises APIError 401."""
        holder = self.keys.holder(key)
        if holder is None:
            how = "send one as Authorization: Bearer KEY, or as x-api-key: KEY"
            raise APIError(401, f"no valid API key; {how}", code="invalid_api_key")
        return holder

    def refuse(self, error: APIError, client: tuple[str, int] | None) -> bytes:
        """Counts and logs a message that is not a request in HTTP. Returns the body of the error answer."""
        self._metrics.http_request("other", "other", error.status)
        fields = {"client": address_of(client), "status": error.status, "error": error.message}
        _log.info("request", extra={"fields": fields})
        return self._encode_error(error, None).body

    def _record(self, scope: Scope, info: RequestInfo, code: int) -> None:
        """Records a request for its tenant before its client has all of the answer: a process that is killed then has
        answered nothing that is in no ledger."""
        if self.office is None or info.recorded:
            return
        info.recorded, route = True, self._route_of(scope["path"])
        if route.encode() not in OPEN_PATHS:
            self.office.record(info, _method(scope), route, code, self._proxies.client(scope))

    def _end(self, scope: Scope, info: RequestInfo, status: int | None) -> None:
        code = _CLIENT_GONE if info.client_gone or status is None else status
        route, method = self._route_of(scope["path"]), _method(scope)
        self._metrics.http_request(method, route, code)
        self._record(scope, info, code)
        if info.trace is not None:
            info.trace.attributes |= {
                "http.request.method": method,
                "http.route": route,
                "penstock.request_id": info.request_id,
                "gen_ai.response.id": info.answer_id,
            }
            info.trace.end(code)
        if (
            route.encode() in OPEN_PATHS
            or (route in self._quiet and code == 200)
            or not _log.isEnabledFor(logging.INFO)
            or (code < _ERRORS and random.random() >= self._logged_share)
        ):
            return
        fields = {
            "client": self._proxies.client(scope),
            "method": method,
            "path": shown_path(scope),
            "status": code,
            "seconds": round(time.monotonic() - info.start, 4),
            "request_id": info.request_id,
        }
        if info.answer_id:
            fields["answer_id"] = info.answer_id
        if info.key:
            fields["key"] = info.key
        fields |= info.shown
        _log.info("request", extra={"fields": fields})


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in _METHODS else "other"


def _connected() -> bool:
    """Whether the client of a connection that does not say so has gone."""
    return False


def bearer(scope: Scope) -> bytes:
    """The key that a request has: in Authorization, in Anthropic's x-api-key, or in a WebSocket's subprotocol, since a
    page cannot set its headers. b"" if it has none."""
    scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    if (other := header(scope, b"x-api-key")) is not None:
        return other.strip()
    offered: Sequence[str] = scope.get("subprotocols", ())
    return next((name.removeprefix(KEY_PROTOCOL) for name in offered if name.startswith(KEY_PROTOCOL)), "").encode()


def _request_id(given: bytes | None) -> bytes:
    """The client's request id if it is safe in a header and a log, else a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
