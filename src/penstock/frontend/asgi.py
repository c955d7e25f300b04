"""The ASGI types, and the little that every route does with them."""

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"


@dataclass(slots=True)
class Visit:
    """What is known of a request outside its body. Travels in its scope."""

    request_id: str
    start: float  # when it came, on time.monotonic()
    tenant: str = ""  # of its API key
    client_gone: bool = False  # before the answer was complete


def visit(scope: Scope) -> Visit:
    found: Visit = scope["penstock.visit"]
    return found


async def respond(
    send: Send, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
) -> None:
    """A whole answer."""
    fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header given once; of one given more often, the first."""
    return next((value for key, value in scope["headers"] if key == name), None)
