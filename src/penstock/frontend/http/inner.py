"""Requests to the app that arrive inside another protocol: as messages of a WebSocket, or as calls of gRPC."""

import asyncio
from urllib.parse import quote

from penstock.frontend.http.asgi import JSON, ASGIApp, Headers, Message, Scope, Send
from penstock.frontend.http.buffers import HeldBytes


class InnerRequest:
    """A GET request, or a POST request with a JSON body. The app treats it as one that came over HTTP: the same checks,
    limits and logs."""

    def __init__(
        self,
        app: ASGIApp,
        connection: Scope,
        path: str,
        body: bytes | None,
        headers: Headers,
        unread: HeldBytes,
    ) -> None:
        """`connection` is the scope of the connection it came on. `path` is not encoded. `headers` are those besides
        the body's. Without a body it is a GET request. `unread` counts the bytes of the answer until the caller
        releases it."""
        self.unread = unread
        self._app = app
        self._body = body
        self._gone = asyncio.Event()
        if body is not None:
            headers = [*headers, (b"content-type", JSON), (b"content-length", b"%d" % len(body))]
        self._scope = {
            "type": "http",
            "asgi": connection["asgi"],
            "http_version": "1.1",
            "method": "GET" if body is None else "POST",
            "scheme": connection["scheme"],
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": connection["client"],
            "server": connection["server"],
            "penstock.unread": unread,
            "penstock.gone": self._gone.is_set,
        }

    @property
    def cancelled(self) -> bool:
        return self._gone.is_set()

    def cancel(self) -> None:
        """Aborts the request, as if its client had closed the connection."""
        self._gone.set()

    async def run(self, send: Send) -> None:
        """Returns when the app has answered, or has noticed that the request is cancelled."""
        await self._app(self._scope, self._receive, send)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}
