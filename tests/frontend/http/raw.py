"""HTTP/1.1 as bytes on a real socket, for what no client library sends."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from tests.patience import PATIENCE


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop of production."""
    return uvloop.EventLoopPolicy()


def request(path: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


async def next_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, Any]:
    """Returns the status, the headers and the decoded body of a connection's next answer."""
    status = await asyncio.wait_for(status_of(reader), PATIENCE)
    head = await reader.readuntil(b"\r\n\r\n")
    return status, head, json.loads(await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0])))


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes at once with a reset, as a crashed client's machine does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()
