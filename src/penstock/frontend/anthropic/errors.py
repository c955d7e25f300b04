"""Encodes errors as Anthropic does."""

import orjson

from penstock.frontend.errors import APIError, ContextOverflow
from penstock.frontend.http.asgi import Answer

_OVERLOADED = 529
_BUSY = ("queue_full", "too_many_requests", "too_many_bodies")  # 429 because of all clients together, not of this one
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def encode_error(error: APIError) -> Answer:
    return Answer(error_body(error), _status(error))


def error_body(error: APIError) -> bytes:
    status = _status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": _message(error)}})


def _message(error: APIError) -> str:
    if isinstance(error, ContextOverflow):  # clients look for these words, and compact the conversation
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return error.message


def _status(error: APIError) -> int:
    return _OVERLOADED if error.status == 503 or error.code in _BUSY else error.status
