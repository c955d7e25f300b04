"""Encodes errors as Triton does."""

import orjson

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer


def encode_error(error: APIError) -> Answer:
    return Answer(error_body(error), error.status)


def error_body(error: APIError) -> bytes:
    unknown = "Request for unknown model: " if error.code == "model_not_found" else ""  # clients look for these words
    return orjson.dumps({"error": unknown + error.message})
