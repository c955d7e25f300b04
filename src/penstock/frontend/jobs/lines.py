"""The lines of a batch: requests, and their answers, in the format of OpenAI's batch API."""

from collections.abc import Collection

import msgspec

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")  # of the requests
MAX_CUSTOM_ID = 512  # characters


class BatchLine(msgspec.Struct):
    """One request. `body` is what a client would post to `url`."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class AnswerLine(msgspec.Struct):
    """The part of an answer's line that says whose it is."""

    custom_id: str


def read_line(line: bytes, paths: Collection[str]) -> BatchLine:
    """Raises ValueError that says what is wrong. `paths` are the accepted values of `url`."""
    try:
        request = decode(BatchLine, line)
    except APIError as error:
        text = error.message.replace("the body ", "the line ", 1)
        raise ValueError(f'{text}; a line is {{"custom_id": ..., "url": ..., "body": {{...}}}}') from None
    if not 0 < len(request.custom_id) <= MAX_CUSTOM_ID:
        raise ValueError(f"custom_id has {len(request.custom_id)} characters; it must have 1 to {MAX_CUSTOM_ID}")
    if request.method != "POST":
        raise ValueError(f"method is {request.method[:20]!r}; it must be POST")
    if request.url not in paths:
        raise ValueError(f"url is {request.url[:100]!r}; it must be one of {', '.join(paths)}")
    if bytes(request.body).lstrip()[:1] != b"{":
        raise ValueError("body is not an object; write what a client would post")
    return request


def write_line(custom_id: str, request_id: str, answer: Answer) -> bytes:
    """The line of an answer; also of one that is an error."""
    response = {"status_code": answer.status, "request_id": request_id, "body": msgspec.Raw(answer.body)}
    line = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(line) + b"\n"
