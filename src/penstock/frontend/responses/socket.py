"""GET /v1/responses as a WebSocket: each message creates a response, and is answered by the events of its stream."""

import itertools

import msgspec
import orjson

from penstock.frontend.errors import invalid
from penstock.frontend.http.body import decode
from penstock.frontend.sockets import SocketCancel, SocketRequest

_PATH = "/v1/responses"
_TYPE = "response.create"
_FIXED = ("stream", "background")  # parameters of HTTP that a message has no use for


class _MessageType(msgspec.Struct):
    type: str


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ResponseSocket:
    """Reads and writes the messages of a socket. Its responses are made one after the other."""

    at_once = 1
    decodes_all = True

    def __init__(self) -> None:
        self._keys = itertools.count()

    def read(self, message: bytes) -> SocketRequest | SocketCancel:
        """Raises APIError 400."""
        kind = decode(_MessageType, message).type
        if kind != _TYPE:
            raise invalid(f"type is {kind[:60]!r}; it must be {_TYPE!r}", "type")
        fields = _fields.decode(message)
        for name in ("type", *_FIXED):
            fields.pop(name, None)
        fields["stream"] = msgspec.Raw(b"true")
        return SocketRequest(str(next(self._keys)), _PATH, msgspec.json.encode(fields))

    def event(self, key: str, data: bytes) -> bytes:
        return data

    def whole(self, key: str, body: bytes) -> bytes:
        return body

    def failure(self, key: str | None, status: int, body: bytes, retry_after: int | None) -> bytes:
        after = b"null" if retry_after is None else b"%d" % retry_after
        return b'{"type":"error","status":%d,"retry_after":%b,' % (status, after) + body[1:]

    def cancelled(self, key: str) -> bytes:
        return orjson.dumps({"type": "error", "status": 499, "error": {"message": "the response was cancelled"}})
