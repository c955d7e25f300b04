"""Refusals of requests that exceed a tenant's limits, and the headers that say what is left."""

import datetime
import math

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Headers
from penstock.frontend.tenants.quotas import NANO, Amounts, QuotaDecision

_WORDS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "concurrent_requests": "requests at a time",
    "tokens_per_day": "tokens a day",
    "tokens_per_month": "tokens a month",
    "budget_per_month": "budget of a month",
}
_LONGEST = 86_400  # seconds in Retry-After


def quota_error(decision: QuotaDecision, wanted: Amounts, about: Headers) -> APIError:
    """Returns the error for a request that was refused, with the headers `about` the limits."""
    headers = {name.decode(): value.decode() for name, value in about}
    limit = decision.refused
    words = _WORDS[limit]
    if limit == "concurrent_requests":
        message = f"your limit of {words} is reached; wait until one has ended"
        return APIError(429, message, code="rate_limit_exceeded", retry_after=1, headers=headers)
    most, left, _ = decision.left[limit]
    scale = NANO if limit == "budget_per_month" else 1
    unit = wanted.money if scale > 1 else wanted.requests if limit.startswith("requests") else wanted.tokens
    sizes = f"the limit is {most / scale:g} {words}, {left / scale:g} are left, and this request may use "
    sizes += f"{unit / scale:g}"
    code = "insufficient_quota" if limit.endswith("month") else "rate_limit_exceeded"
    if decision.retry_after < 0:
        message = f"{sizes}: it can never start; shorten the prompt, or lower max_tokens"
        return APIError(429, message, code=code, headers={**headers, "x-should-retry": "false"})
    seconds = max(1, min(math.ceil(decision.retry_after), _LONGEST))
    message = f"{sizes}; try again in {seconds} s, or lower max_tokens"
    return APIError(429, message, code=code, retry_after=seconds, headers=headers)


def rate_headers(decision: QuotaDecision) -> Headers:
    """Returns the headers of OpenAI and of Anthropic about limits a minute."""
    headers: Headers = []
    for unit in ("requests", "tokens"):
        found = decision.left.get(f"{unit}_per_minute")
        if found is None:
            continue
        most, left, seconds = found
        until = f"{datetime.datetime.fromtimestamp(decision.now + seconds, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
        for name, value in (
            (f"x-ratelimit-limit-{unit}", str(most)),
            (f"x-ratelimit-remaining-{unit}", str(left)),
            (f"x-ratelimit-reset-{unit}", f"{math.ceil(seconds)}s"),
            (f"anthropic-ratelimit-{unit}-limit", str(most)),
            (f"anthropic-ratelimit-{unit}-remaining", str(left)),
            (f"anthropic-ratelimit-{unit}-reset", until),
        ):
            headers.append((name.encode(), value.encode()))
    return headers
