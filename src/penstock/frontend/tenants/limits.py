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
    "budget_per_month": "of the currency a month",
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
    money = limit == "budget_per_month"
    unit = wanted.money if money else wanted.requests if limit.startswith("requests") else wanted.tokens
    texts = [f"{each / NANO:,.6f}".rstrip("0").rstrip(".") if money else f"{each:,}" for each in (most, left, unit)]
    sizes = f"the limit is {texts[0]} {words}, {texts[1]} are left, and this request may use {texts[2]}"
    code = "insufficient_quota" if limit.endswith("month") else "rate_limit_exceeded"
    if decision.retry_after < 0:
        message = f"{sizes}: it can never start; shorten the prompt, or lower max_tokens"
        return APIError(429, message, code=code, headers={**headers, "x-should-retry": "false"})
    seconds = max(1, math.ceil(decision.retry_after))
    message = f"{sizes}; try again in {seconds:,} s, or lower max_tokens"
    return APIError(429, message, code=code, retry_after=min(seconds, _LONGEST), headers=headers)


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
