"""GET /v1/chat/ws: chats over a WebSocket. The bodies and chunks are those of POST /v1/chat/completions."""

import msgspec
import orjson

from penstock.frontend.errors import invalid
from penstock.frontend.http.body import decode
from penstock.frontend.sockets import SocketCancel, SocketRequest

_PATH = "/v1/chat/completions"
_MAX_ID_CHARS = 128


class _SocketMessage(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    body: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    cancel: bool = False


class ChatSocket:
    """Reads and writes the messages of a socket. Every message to the client has the id of its request, and a type."""

    at_once = None
    decodes_all = False

    def __init__(self) -> None:
        self._failed: set[str] = set()  # ids whose stream has sent an error

    def read(self, message: bytes) -> SocketRequest | SocketCancel:
        """Raises APIError 400."""
        fields = decode(_SocketMessage, message)
        if not 1 <= len(fields.id) <= _MAX_ID_CHARS:
            raise invalid(f"id has {len(fields.id)} characters; it must have 1 to {_MAX_ID_CHARS}: change it", "id")
        body = bytes(fields.body)
        if fields.cancel == bool(body):
            raise invalid('send either a body, or "cancel": true', "body")
        return SocketCancel(fields.id) if fields.cancel else SocketRequest(fields.id, _PATH, body)

    def event(self, key: str, data: bytes) -> bytes:
        if data == b"[DONE]":
            if key not in self._failed:
                return _message(key, b"done")
            self._failed.remove(key)
            return b""
        if data.startswith(b'{"error":'):
            self._failed.add(key)
            return _message(key, b"error", b'"status":null,"retry_after":null,' + data[1:-1])
        return _message(key, b"chunk", b'"chunk":' + data)

    def whole(self, key: str, body: bytes) -> bytes:
        return _message(key, b"completion", b'"completion":' + body)

    def failure(self, key: str | None, status: int, body: bytes, retry_after: int | None) -> bytes:
        after = b"null" if retry_after is None else b"%d" % retry_after
        return _message(key, b"error", b'"status":%d,"retry_after":%b,' % (status, after) + body[1:-1])

    def cancelled(self, key: str) -> bytes:
        return _message(key, b"cancelled")


def _message(key: str | None, kind: bytes, fields: bytes = b"") -> bytes:
    return b'{"id":' + orjson.dumps(key) + b',"type":"' + kind + b'"' + (b"," + fields if fields else b"") + b"}"
