"""Refuses requests that a page of another site makes through its reader's browser.

A server without an API key on loopback is open to everything on the machine, and a browser there sends requests for any
page. These requests cost time, even if their answers cannot be read. Browsers mark them: with `Sec-Fetch-Site`, and
with `Origin` if it is a POST. Programs send neither. Before a page sends JSON to another origin, the browser sends the
server a preflight request. It sends none before other content types, or none at all; `read_body` refuses these.
"""

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Scope, header

_OWN = (b"same-origin", b"none")  # `none`: the user typed the address


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
