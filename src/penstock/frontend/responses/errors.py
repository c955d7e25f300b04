"""Encodes errors as OpenAI's Responses API does."""

from penstock.frontend import error_body
from penstock.frontend.errors import APIError, ContextOverflow
from penstock.frontend.http.asgi import Answer


def encode_error(error: APIError) -> Answer:
    if isinstance(error, ContextOverflow):
        message = f"Your input exceeds the context window of this model: {error.message}"
        error = APIError(error.status, message, param=error.param, code=error.code)
    return error_body.encode_error(error)
