"""Encodes errors as Ollama does."""

import orjson

from penstock.frontend.errors import APIError, ContextOverflow
from penstock.frontend.http.asgi import Answer


def encode_error(error: APIError) -> Answer:
    return Answer(error_body(error), error.status)


def error_body(error: APIError) -> bytes:
    message = error.message
    if isinstance(error, ContextOverflow):
        message = f"the input length exceeds the context length: {message}"
    return orjson.dumps({"error": message})
