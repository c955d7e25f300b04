"""Encodes errors as Triton does."""

import orjson

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer


def encode_error(error: APIError) -> Answer:
    return Answer(error_body(error), error.status)


def error_body(error: APIError) -> bytes:
    return orjson.dumps({"error": error.message})
