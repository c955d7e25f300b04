"""Encodes errors so that clients of Cohere, of Jina and of OpenAI's API find the message where they look."""

import orjson

from penstock.frontend.errors import APIError


def encode_error(error: APIError) -> bytes:
    """The body of an error response."""
    fields = {"message": error.message, "param": error.param, "code": error.code}
    return orjson.dumps({"message": error.message, "detail": error.message, "error": fields})
