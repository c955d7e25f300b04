"""ASGI types and functions that every route uses."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.frontend.http.buffers import HeldBytes
from penstock.frontend.tenants.grant import Grant
from penstock.observe.tracing import RequestTrace

if TYPE_CHECKING:
    from penstock.frontend.tenants.account import RequestAccount

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"
LIVE_PATHS = ("/livez", "/v2/health/live")  # the second one is KServe's, here and below
READY_PATHS = ("/readyz", "/health", "/ping", "/v2/health/ready")
_SHOWN_PATH = 200  # bytes of a path in the log


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Mapping[str, str] = MappingProxyType({})


class StreamedAnswer(NamedTuple):
    """An answer that is sent in parts. Most are not in memory as a whole; one that is `held` is, and counts as a body
    until it has been sent."""

    chunks: AsyncIterator[bytes]
    content_type: bytes
    size: int | None = None  # in bytes; None: not known
    headers: Mapping[str, str] = MappingProxyType({})
    held: bool = False


class RequestInfo(msgspec.Struct):
    """Facts about a request that are not in its body. The request's scope carries them."""

    request_id: str
    start: float  # when the request arrived, on time.monotonic()
    unread: HeldBytes  # the answer's part of the budget of answers
    admin: bool = False  # the request may use the operator's routes
    tenant: str = ""  # identifies the API key's holder; "" without keys
    key: str = ""  # the name of the API key's holder, if it has one
    answer_id: str = ""  # is part of the ids of the answer and of its requests in the engine; "": it has none
    trace: RequestTrace | None = None  # of a request that is traced
    shown: Mapping[str, Any] = MappingProxyType({})  # what its line in the log says besides, by field
    client_gone: bool = False  # the client closed the connection before the answer was complete
    grant: Grant | None = None  # what the API key allows, if the server has a tenants file
    account: "RequestAccount | None" = None  # of a request that may use the engine, if there are tenants
    headers: Headers = msgspec.field(default_factory=list)  # of the answer
    error: str = ""  # the code of the error that is the answer
    texts: dict[str, str] = {}  # digests of the request and its answer, for the audit log
    recorded: bool = False  # `Access` has given it to the ledger and the audit log


def request_info(scope: Scope) -> RequestInfo:
    """The facts that `Access` put into the scope."""
    found: RequestInfo = scope["penstock.request"]
    return found


async def respond(
    send: Send, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
) -> None:
    """Sends a whole answer."""
    fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def trace_headers(scope: Scope) -> dict[str, str]:
    found = {name: header(scope, name) for name in (b"traceparent", b"tracestate")}
    return {name.decode(): value.decode("latin-1") for name, value in found.items() if value is not None}


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first value of a header, or None if the request does not have it."""
    return first_value(scope["headers"], name)


def first_value(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a header, or None if it is not among `headers`."""
    return dict(reversed(headers)).get(name)  # the first of several comes last here


def handshake_send(send: Send) -> Send:
    """A WebSocket's `send` that also takes the messages of an HTTP answer, which refuses the handshake."""

    def sends(message: Message) -> Awaitable[None]:
        if message["type"].startswith("http."):
            message["type"] = "websocket." + message["type"]
        return send(message)

    return sends


def shown_path(scope: Scope) -> str:
    """The path as the client sent it, without the query, which may hold secrets. Bounded and in printable ASCII."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    text = raw[:_SHOWN_PATH].decode("ascii", "backslashreplace")
    shown = text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return shown + "…" if len(raw) > _SHOWN_PATH else shown
