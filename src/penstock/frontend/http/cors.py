"""Requests of web pages: those of other origins that the operator allows
(https://fetch.spec.whatwg.org/#http-cors-protocol), and those that a page of another site makes through its reader's
browser, which are refused.

A server without an API key on loopback is open to everything on the machine, and a browser there sends requests for any
page. These requests cost time, even if their answers cannot be read. Browsers mark them: with `Sec-Fetch-Site`, and
with `Origin` if it is a POST. Programs send neither. Before a page sends JSON to another origin, the browser sends the
server a preflight request. It sends none before other content types, or none at all; `read_body` refuses these.
"""

import re
from collections.abc import Iterable

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Headers, Scope, Send, header

_SHARED = b"x-request-id, request-id, retry-after, x-should-retry"  # headers of answers that a page may read
_METHODS = b"GET, POST, DELETE, OPTIONS"
_SECONDS = b"600"  # that a browser may remember the answer to a preflight
_HEADER_NAMES = re.compile(rb"[a-z0-9-]+(, ?[a-z0-9-]+)*")  # as browsers write them
_MAX_HEADERS = 1024  # bytes
_OWN = (b"same-origin", b"none")  # `none`: the user typed the address


class Cors:
    """Decides which origins may read answers. No cookies are used, so no credentials are allowed."""

    def __init__(self, origins: Iterable[str]) -> None:
        """`origins` are compared with the Origin header as they are."""
        self._origins = frozenset(origin.encode() for origin in origins)

    def allowed(self, scope: Scope) -> bytes | None:
        """Returns the request's origin if it is allowed."""
        if not self._origins:
            return None
        origin = header(scope, b"origin")
        return origin if origin in self._origins else None

    def headers(self, origin: bytes | None) -> Headers:
        """Returns the headers of every answer. `origin` is an allowed one, or None."""
        if not self._origins:
            return []
        vary = (b"vary", b"origin")
        if origin is None:
            return [vary]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _SHARED), vary]


def is_preflight(scope: Scope) -> bool:
    """Returns True for a browser's preflight request, which checks that a page may send a request."""
    return scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None


async def answer_preflight(scope: Scope, send: Send) -> None:
    """Allows a page of an allowed origin every method and every header that it names."""
    headers = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _SECONDS)]
    wanted = header(scope, b"access-control-request-headers")
    if wanted and len(wanted) <= _MAX_HEADERS and _HEADER_NAMES.fullmatch(wanted):
        headers.append((b"access-control-allow-headers", wanted))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def check_site(scope: Scope) -> None:
    """Raises APIError 403 if a page of another origin made the request."""
    site = header(scope, b"sec-fetch-site")
    origin = header(scope, b"origin")
    if site is not None and site not in _OWN:
        raise _refused(f"Sec-Fetch-Site: {site[:40].decode('latin-1')}")
    if origin is not None and origin.partition(b"://")[2].lower() != (header(scope, b"host") or b"").lower():
        raise _refused(f"Origin: {origin[:100].decode('latin-1')}")


def _refused(what: str) -> APIError:
    message = (
        f"requests from web pages of other sites are refused ({what}), as this server has no API key; allow the site "
        "with --cors-origin, set --api-key, or send this from a program"
    )
    return APIError(403, message, code="origin_refused", close=True)
