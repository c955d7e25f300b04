"""Encodes errors in OpenAI's form, for the wires whose APIs use that form."""

import orjson

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer


def encode_error(error: APIError) -> Answer:
    return Answer(error_body(error), error.status)


def error_body(error: APIError) -> bytes:
    """The body of an error response. It always has all four keys."""
    fields = {"message": error.message, "type": _type(error.status), "param": error.param, "code": error.code}
    return orjson.dumps({"error": fields})


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    if status == 429:
        return "rate_limit_error"
    return "authentication_error" if status in (401, 403) else "invalid_request_error"
