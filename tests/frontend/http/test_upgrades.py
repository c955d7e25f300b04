"""Requests that ask for another protocol than a WebSocket, as Java's client and curl do, and bodies of all of them."""

import asyncio

import pytest

from tests.frontend.conftest import NAME, Site, live
from tests.frontend.http.raw import connection, event_loop_policy, next_answer
from tests.patience import PATIENCE

__all__ = ["event_loop_policy"]

BODY = f'{{"model": "{NAME}", "prompt": "hello"}}'.encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
NEXT = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
HANDSHAKE = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"


def head(start: bytes, protocol: bytes, more: bytes = b"") -> bytes:
    fields = b"host: localhost\r\ncontent-type: application/json\r\nconnection: Upgrade\r\nupgrade: %b\r\n" % protocol
    return start + b" HTTP/1.1\r\n" + fields + more + b"\r\n"


SENT = {
    "length": (head(b"POST /tokenize", b"h2c", LENGTH) + BODY, 200),
    "chunks": (head(b"POST /tokenize", b"h2c", CHUNKED) + CHUNKS, 200),
    "websocket": (head(b"POST /tokenize", b"websocket", LENGTH) + BODY, 200),
    "handshake": (head(b"GET /v1/chat/ws", b"websocket", HANDSHAKE + LENGTH) + BODY, 426),
    "no body": (head(b"GET /v1/models", b"h2c"), 200),
    "length 0": (head(b"GET /v1/models", b"h2c", b"content-length: 0\r\n"), 200),
}


@pytest.mark.parametrize("cut", [1, 7, 100_000])
@pytest.mark.parametrize("name", SENT)
async def test_the_body_is_read_and_then_the_next_request(site: Site, name: str, cut: int) -> None:
    sent, status = SENT[name]
    async with live(site) as port, connection(port) as (reader, writer):
        for _ in range(2):
            everything = sent + NEXT
            for start in range(0, len(everything), cut):
                writer.write(everything[start : start + cut])
                await writer.drain()
                if cut < len(everything):
                    await asyncio.sleep(0.0005)
            async with asyncio.timeout(PATIENCE):
                first, _, answer = await next_answer(reader)
                second, _, models = await next_answer(reader)
            assert first == status, answer
            assert second == 200 and models["object"] == "list"
            if "POST" in sent[:4].decode():
                assert answer["tokens"]


@pytest.mark.parametrize("gap", [0.0, 0.1])
@pytest.mark.parametrize("path", [b"POST /tokenize", b"GET /v1/models", b"GET /v1/chat/ws"])
async def test_a_request_in_a_body_is_not_answered(site: Site, path: bytes, gap: float) -> None:
    """A proxy that checks paths has seen one request."""
    hidden = b"GET /is_sleeping HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(head(path, b"websocket", HANDSHAKE + b"content-length: %d\r\n" % len(hidden)))
        await asyncio.sleep(gap)
        writer.write(hidden + NEXT.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        received = await asyncio.wait_for(reader.read(), PATIENCE)
    assert received.count(b"HTTP/1.1 ") == 2 and b"is_sleeping" not in received


async def test_a_body_is_bounded_as_any_other(site: Site) -> None:
    async with live(site) as port:
        for framing, body, status in (
            (b"content-length: 99999999\r\n", b"{", 413),
            (CHUNKED, b"xyz\r\n", 400),
        ):
            async with connection(port) as (reader, writer):
                writer.write(head(b"POST /tokenize", b"h2c", framing) + body)
                answered, fields, _ = await asyncio.wait_for(next_answer(reader), PATIENCE)
            assert answered == status and b"connection: close" in fields
