"""Digests of requests and answers for the audit log."""

import hashlib
from collections.abc import Awaitable

from penstock.frontend.http.asgi import Message, Receive, RequestInfo, Send

_MOST_TEXT = 256 << 10  # bytes of a text that the log has, for tenants that say so


def digesting(info: RequestInfo, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Returns `receive` and `send` that also put the SHA-256 of both bodies into `info.texts`. For a tenant whose texts
    are to be logged, they put the begin of the bodies there, too."""
    texts = info.texts
    bodies = {"request": _Body("request", info), "answer": _Body("answer", info)}

    async def receives() -> Message:
        message = await receive()
        if (body := message.get("body")) is not None:
            bodies["request"].add(body)
            if not message.get("more_body", False):
                bodies["request"].end(texts)
        return message

    def sends(message: Message) -> Awaitable[None]:
        if (body := message.get("body")) is not None:
            bodies["answer"].add(body)
            if not message.get("more_body", False):
                bodies["answer"].end(texts)
        return send(message)

    return receives, sends


class _Body:
    def __init__(self, name: str, info: RequestInfo) -> None:
        self._name, self._info = name, info
        self._hash = hashlib.sha256()
        self._text = bytearray()

    def add(self, part: bytes) -> None:
        self._hash.update(part)
        grant = self._info.grant
        if grant is not None and grant.entry.audit_text:
            self._text += part[: _MOST_TEXT - len(self._text)]

    def end(self, texts: dict[str, str]) -> None:
        texts[f"{self._name}_sha256"] = self._hash.hexdigest()
        if self._text:
            texts[self._name] = self._text.decode(errors="replace")
