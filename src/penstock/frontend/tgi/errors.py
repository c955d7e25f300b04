"""Encodes errors as TGI does."""

import orjson

from penstock.frontend.errors import APIError, ContextOverflow
from penstock.frontend.http.asgi import Answer

_STATUSES = {400: 422, 500: 424, 503: 429}  # TGI's, where they differ
_TYPES = {422: "validation", 424: "generation", 429: "overloaded"}


def encode_error(error: APIError) -> Answer:
    return Answer(error_body(error), _STATUSES.get(error.status, error.status))


def error_body(error: APIError) -> bytes:
    kind = _TYPES.get(_STATUSES.get(error.status, error.status), "validation")
    message = error.message
    if isinstance(error, ContextOverflow):
        message = f"Input validation error: `inputs` must have less than {error.limit} tokens. Given: {error.tokens}"
    return orjson.dumps({"error": message, "error_type": kind})
