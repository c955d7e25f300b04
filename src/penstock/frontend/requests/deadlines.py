"""The deadlines of a request: from its header, its parameters and the server's limits."""

import math

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import invalid
from penstock.frontend.http.asgi import first_value

HEADER = "X-Request-Timeout"
MOST = 86400.0  # seconds
_NAME = HEADER.lower().encode()


def check_timeout(value: float | None, param: str, limit: float | None) -> None:
    """Raises APIError 400 if a request's timeout is 0 or below, or above the server's limit."""
    most = limit or MOST
    if value is not None and not 0 < value <= most:
        raise invalid(f"{param} is {value:g}; it must be above 0 and at most {most:g} seconds: change it", param)


def deadlines(
    context: RequestContext, timeout: float | None, first_token_timeout: float | None
) -> tuple[float | None, float | None]:
    """Returns when the last and the first token are due, in seconds on time.monotonic(); None: at any time.

    If there are several timeouts, the shortest counts. Raises APIError 400 for a wrong header.
    """
    limits = context.limits
    total = _shortest(timeout, _header(context), limits.request_timeout)
    first = _shortest(first_token_timeout, limits.first_token_timeout)
    return (
        None if total is None else context.start + total,
        None if first is None else context.start + first,
    )


def _shortest(*seconds: float | None) -> float | None:
    return min((value for value in seconds if value is not None), default=None)


def _header(context: RequestContext) -> float | None:
    text = first_value(context.headers, _NAME)
    if text is None:
        return None
    try:
        seconds = float(text) if len(text) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        shown = text[:32].decode("ascii", "backslashreplace")
        raise invalid(f"the header {HEADER} is {shown!r}; give a number of seconds, such as 2.5", HEADER)
    check_timeout(seconds, HEADER, context.limits.request_timeout)
    return seconds
