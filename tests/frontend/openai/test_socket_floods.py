"""Clients that send a WebSocket more than they read, in tiny frames, or never the end of a message."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable

import pytest

from penstock.frontend import RequestLimits
from penstock.frontend.http.websocket import MOST_FRAMES
from tests.frontend.conftest import Site, live
from tests.frontend.http.raw import event_loop_policy
from tests.frontend.openai.test_sockets import PATH
from tests.patience import PATIENCE, until

__all__ = ["event_loop_policy"]

HANDSHAKE = (
    f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
).encode()
CONTINUATION, TEXT, CLOSE, PING = 0, 1, 8, 9
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def frame(opcode: int, data: bytes = b"", *, last: bool = True) -> bytes:
    return bytes((last << 7 | opcode, 0x80 | len(data))) + bytes(4) + data  # the mask is 0


@contextlib.asynccontextmanager
async def socket(port: int) -> AsyncIterator[Opened]:
    """A connection after its handshake, of a client that reads only what it is told to."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    try:
        writer.write(HANDSHAKE)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        yield reader, writer
    finally:
        writer.transport.abort()


async def close_code(reader: asyncio.StreamReader) -> int:
    """The code of the close frame that comes next."""
    head = await asyncio.wait_for(reader.readexactly(4), PATIENCE)
    assert head[0] == 0x80 | CLOSE
    return int.from_bytes(head[2:])


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("sent", [frame(PING, b"x" * 125), frame(PING)], ids=["long", "empty"])
async def test_pings_whose_answers_are_not_read_stop_the_reading(site: Site, sent: bytes) -> None:
    most, before = 64 << 20, resident()
    flood = sent * ((1 << 20) // len(sent))
    async with live(site) as port, socket(port) as (_, writer):
        began, written = time.monotonic(), 0
        while written < most and time.monotonic() - began < 5:
            writer.write(flood)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await writer.drain()
                    written += len(flood)
                    continue
            break
        assert written < most / 2, "all of it was taken"
        assert resident() - before < 32 << 20
        assert site.app.bodies.used < 1 << 20
        writer.transport.abort()
        await until(lambda: site.app.sockets == 0 and site.app.bodies.used == 0)


async def test_answers_that_are_not_read_stop_the_reading(site: Site) -> None:
    most, before = 32 << 20, resident()
    flood = frame(TEXT, b'{"id":1}') * 50_000
    async with live(site) as port, socket(port) as (_, writer):
        written = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while written < most:
                    writer.write(flood)
                    await writer.drain()
                    written += len(flood)
        assert written < most, "all of it was taken"
        assert resident() - before < 32 << 20
        assert site.app.bodies.used < 1 << 20


async def test_messages_wait_outside_until_the_app_takes_them(site: Site) -> None:
    count = 10_000
    async with live(site) as port, socket(port) as (reader, writer):
        writer.write(frame(TEXT) * count)
        async with asyncio.timeout(60):
            for _ in range(count):  # all are answered in the end
                await reader.readuntil(b'"type":"error"')
        assert site.app.bodies.used == 0


async def test_a_message_has_so_many_frames(site: Site) -> None:
    async with live(site) as port:
        async with socket(port) as (reader, writer):
            part = frame(CONTINUATION, b" ", last=False)
            writer.write(frame(TEXT, b"{", last=False) + part * (MOST_FRAMES - 2) + frame(CONTINUATION, b"}"))
            head = await asyncio.wait_for(reader.readexactly(2), PATIENCE)
            assert head[0] == 0x80 | TEXT  # an error about its content
        async with socket(port) as (reader, writer):
            writer.write(frame(TEXT, b"{", last=False) + frame(CONTINUATION, last=False) * 100_000)
            assert await close_code(reader) == 1009
        assert site.app.bodies.used == 0


PARTS = {"frames": (frame(TEXT, b"{", last=False), frame(PING)), "bytes": (frame(TEXT, b"{" * 100)[:50], b"{")}


@pytest.mark.parametrize("name", PARTS)
async def test_a_message_must_come_to_its_end(make_site: Callable[..., Site], name: str) -> None:
    """Its bytes count among those of all bodies, so that a few clients could keep others from sending any."""
    begin, more = PARTS[name]
    site = make_site(limits=RequestLimits(body_timeout=1.0))
    async with live(site) as port, socket(port) as (reader, writer):
        writer.write(begin)
        await asyncio.sleep(0.5)
        assert site.app.bodies.used
        writer.write(more)
        received = await asyncio.wait_for(reader.read(), PATIENCE)
        assert (1008).to_bytes(2) + b"the message did not arrive within 1 s" in received
        await until(lambda: site.app.bodies.used == 0)


async def test_streams_of_a_socket_that_was_closed_end_quietly(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    """The server closes it because of an error while streams still send."""
    site = make_site(max_model_len=4000)
    site.says("hello world, ", ends=False)
    site.engine.output = lambda request, choice: [*site.tokenizer.encode("hello ", add_special_tokens=False)] * 500
    async with live(site) as port, socket(port) as (reader, writer):
        for i in range(8):
            body = b'{"id":"%d","body":{"messages":[{"role":"user","content":"hi"}],"stream":true}}' % i
            writer.write(frame(TEXT, body))
        await asyncio.wait_for(reader.readexactly(2000), PATIENCE)  # they stream
        writer.write(bytes((0x80 | TEXT, 0)))  # without a mask: a frame of a server
        received = await asyncio.wait_for(reader.read(), PATIENCE)
        assert (1002).to_bytes(2) in received
        await until(lambda: site.app.sockets == 0 and site.app.lifecycle.requests == 0)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
