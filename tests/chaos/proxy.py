"""A TCP proxy with faults: it slows connections down, cuts them after some bytes, or resets them."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """How connections are treated. Bytes are those of answers."""

    bytes_per_second: float = 0.0  # 0: as fast as they come
    reset_after: int = -1  # bytes; -1: never
    delay: float = 0.0  # seconds before each piece


class Proxy:
    """Passes connections to a server's port. `link` may be changed at any time; it holds for new connections."""

    def __init__(self, port: int, link: Link = Link(), host: str = "127.0.0.1") -> None:
        self.link, self._host = link, host
        self.slow = 0.0  # seconds before each piece, also of connections that are open
        self.port = 0
        self.resets = 0
        self._target = port
        self._open: set[asyncio.Task[None]] = set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = self.link
        try:
            there, back = await asyncio.open_connection(self._host, self._target, limit=2**12)
        except OSError:  # nothing listens there now
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        sending = asyncio.create_task(_copy(reader, back))
        try:
            await self._answer(there, writer, link)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            sending.cancel()
            for end in (writer, back):
                end.close()
            self._open.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
        passed = 0
        most = max(1, int(link.bytes_per_second)) if link.bytes_per_second else 65_536
        while True:
            if passed >= link.reset_after >= 0:
                reset(writer)
                self.resets += 1
                return
            piece = await reader.read(most if link.reset_after < 0 else min(most, link.reset_after - passed))
            if not piece:
                return
            if link.bytes_per_second:
                await asyncio.sleep(len(piece) / link.bytes_per_second)
            await asyncio.sleep(link.delay + self.slow)
            writer.write(piece)
            await writer.drain()
            passed += len(piece)

    def close(self) -> None:
        for task in self._open:
            task.cancel()


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with a reset, as a machine that has crashed does."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def proxied(port: int, link: Link = Link(), host: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """A proxy before a server's port."""
    proxy = Proxy(port, link, host)
    server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0, limit=2**12)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
