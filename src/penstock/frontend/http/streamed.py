"""A response whose body is made while it is sent, with a sign of life while nothing is made."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.frontend.http.asgi import Headers, Send

# Clients and proxies give up on a response that is silent, some after 30 s. A long prompt, or the queue, takes longer.
SILENT_SECONDS = 1.5  # until the headers are sent
HEARTBEAT_SECONDS = 5.0


class StreamedResponse:
    """Starts a response with its first bytes, or after SILENT_SECONDS without any. While no bytes are written, it sends
    a heartbeat every HEARTBEAT_SECONDS."""

    def __init__(
        self,
        send: Send,
        headers: Headers,
        opening: Callable[[], bytes],
        heartbeat: bytes,
        silent: float | None = None,
    ) -> None:
        """`opening` makes the bytes that begin the body. `silent` takes the place of SILENT_SECONDS."""
        self._silent_seconds = SILENT_SECONDS if silent is None else silent
        self._send = send
        self._headers = headers
        self._opening = opening
        self._heartbeat = heartbeat
        self._started = False
        self._silent = True
        self._starting = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "StreamedResponse":
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._beating is not None
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)  # it fails if the client has gone

    async def start(self, first: Callable[[], Awaitable[bytes]]) -> None:
        """Starts the response if it has not started, and sends what `first` makes after the opening. If `first` fails,
        nothing is started."""
        async with self._starting:
            opening = b"" if self._started else self._opening()  # before the rest: events have numbers
            data = opening + await first()
            if not self._started:
                self._started = True
                await self._send_start()
        await self.write(data)

    async def is_started(self) -> bool:
        """True if the response has started. If not, it does not start by itself from now on."""
        async with self._starting:
            assert self._beating is not None
            self._beating.cancel()
            return self._started

    async def write(self, data: bytes) -> None:
        self._silent = False
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def _beat(self) -> None:
        await asyncio.sleep(self._silent_seconds)
        async with self._starting:
            if not self._started:
                self._started = True
                await self._send_start()
                await self.write(self._opening() + self._heartbeat)
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self._silent:
                await self._send({"type": "http.response.body", "body": self._heartbeat, "more_body": True})
            self._silent = True
