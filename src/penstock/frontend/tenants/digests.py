"""Digests of requests and answers for the audit log."""

import hashlib
from collections.abc import Awaitable

from penstock.frontend.http.asgi import Message, Receive, RequestInfo, Send

_MOST_TEXT = 256 << 10  # bytes of a text that the log has, for tenants that say so


def digesting(info: RequestInfo, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Returns `receive` and `send` that also put the SHA-256 of both bodies into `info.texts`. For a tenant whose texts
    are to be logged, they put the begin of the bodies there, too."""
    request, answer = _Body("request", info), _Body("answer", info)

    async def receives() -> Message:
        message = await receive()
        request.note(message)
        return message

    def sends(message: Message) -> Awaitable[None]:
        answer.note(message)
        return send(message)

    return receives, sends


class _Body:
    def __init__(self, name: str, info: RequestInfo) -> None:
        self._name, self._info = name, info
        self._hash, self._text = hashlib.sha256(), bytearray()

    def note(self, message: Message) -> None:
        if (part := message.get("body")) is None:
            return
        self._hash.update(part)
        grant, texts = self._info.grant, self._info.texts
        if grant is not None and grant.entry.audit_text:
            self._text += part[: _MOST_TEXT - len(self._text)]
        if not message.get("more_body", False):
            texts[f"{self._name}_sha256"] = self._hash.hexdigest()
            if self._text:
                texts[self._name] = self._text.decode(errors="replace")
