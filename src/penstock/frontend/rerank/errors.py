"""Encodes errors so that clients of Cohere, of Jina and of OpenAI's API find the message where they look."""

import orjson

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer


def encode_error(error: APIError) -> Answer:
    fields = {"message": error.message, "param": error.param, "code": error.code}
    body = orjson.dumps({"message": error.message, "detail": error.message, "error": fields})
    return Answer(body, error.status)
