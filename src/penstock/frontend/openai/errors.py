"""Errors as OpenAI spells them: all four keys, always."""

import orjson

from penstock.frontend.errors import APIError


def encode_error(error: APIError) -> bytes:
    """The body of an error response."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return orjson.dumps({"error": fields})
