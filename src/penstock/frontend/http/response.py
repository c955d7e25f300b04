"""Adds headers to a response, and counts a large one until its client has read it."""

from collections.abc import Awaitable, Callable

from penstock.frontend.http.asgi import Headers, Message, Send
from penstock.frontend.http.buffers import SMALL_ANSWER, HeldBytes


class ResponseTracker:
    """Sends a response with more headers, and holds its status and whether it is complete."""

    __slots__ = ("_before_end", "_headers", "_lasting", "_send", "_unread", "complete", "status")

    def __init__(
        self,
        send: Send,
        headers: Headers,
        unread: HeldBytes,
        *,
        lasting: bool,
        before_end: Callable[[int], None] | None = None,
    ) -> None:
        """`unread` counts the bytes of the response. `lasting`: what was sent stays in memory, so the caller releases
        `unread`; else it is released when the client has read a large body. `before_end` is called with the status
        before the client can have all of an answer."""
        self._before_end = before_end
        self._lasting = lasting
        self._send = send
        self._headers = headers
        self._unread = unread
        self.status: int | None = None
        self.complete = False

    def send(self, message: Message) -> Awaitable[None]:
        if len(message.get("body", b"")) > SMALL_ANSWER:
            return self._send_large(message)
        if message.get("more_body", False):
            return self._send(message)  # a part of the body
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), *self._headers]
            if b"cache-control" not in dict(headers):
                headers.append((b"cache-control", b"no-store"))  # a cache may not treat x-api-key as a secret
            message["headers"] = headers
        elif message["type"] == "websocket.accept":
            self.status = 101
            message["headers"] = [*message.get("headers", ()), *self._headers]
        else:
            self.complete = True
            if self._before_end is not None and message["type"] == "http.response.body":
                self._before_end(self.status or 0)
        return self._send(message)

    async def _send_large(self, message: Message) -> None:
        """Returns when the client has read the body, or after `write_timeout`. Until then the request is in flight and
        its bytes count, since they are in memory. Raises APIError 429 if too many bytes of answers are held."""
        body: bytes = message["body"]
        more: bool = message.get("more_body", False)
        self._unread.become(len(body))
        if self._before_end is not None and not more:
            self._before_end(self.status or 0)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self.complete = not more
        await self._send({"type": "http.response.body", "body": b"", "more_body": more})  # waits for the client
        if not self._lasting:
            self._unread.release()
