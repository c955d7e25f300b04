"""Encodes errors as Ollama does."""

import orjson

from penstock.frontend.errors import APIError, ContextOverflow
from penstock.frontend.http.asgi import Answer


def encode_error(error: APIError) -> Answer:
    """Returns the answer to a request that has failed."""
    return Answer(error_body(error), error.status)


def error_body(error: APIError) -> bytes:
    """Returns {"error": message} as JSON, which is also the last line of a stream that fails. Clients recognise an
    error about a long prompt by Ollama's own words."""
    message = error.message
    if isinstance(error, ContextOverflow):
        message = f"the input length exceeds the context length: {message}"
    return orjson.dumps({"error": message})
