"""What a provider may send that is no answer: each becomes one bounded error, and none shows the key."""

import asyncio
import gzip
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from tests.frontend.providers.conftest import KEY, Make
from tests.frontend.providers.streams import OPENAI_TEXT, SAID, delta, sse

STREAM = sse(*OPENAI_TEXT)
HALF = sse(*OPENAI_TEXT[:3])
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
PIECE = 1 << 16
HUGE = 100 << 20  # bytes


def closed(body: bytes, head: bytes = HEAD) -> list[bytes]:
    """An answer that the end of the connection ends."""
    return [head + b"connection: close\r\n\r\n" + body]


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> list[bytes]:
    framed = (b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return [HEAD + b"transfer-encoding: chunked\r\n\r\n", *framed, end]


def sized(body: bytes, length: int) -> list[bytes]:
    return [HEAD + b"content-length: %d\r\n\r\n" % length + body]


def flood(head: bytes, piece: bytes) -> Iterable[bytes]:
    """100 MB of one piece, after a head."""
    yield head
    yield from itertools.repeat(piece * (PIECE // len(piece)), HUGE // PIECE)


class RawProvider:
    """Sends bytes, whatever they are, and then closes the connection."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterable[bytes]] = list
        self.requests = self.sent = self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(size)
            for part in self.make():
                writer.write(part)
                self.sent += len(part)
                await writer.drain()
        except ConnectionError:
            pass  # the gateway has seen enough
        finally:
            writer.close()


@pytest.fixture
async def provider() -> AsyncIterator[RawProvider]:
    raw = RawProvider()
    server = await asyncio.start_server(raw.answer, "127.0.0.1", 0)
    async with server:
        raw.port = server.sockets[0].getsockname()[1]
        yield raw


@pytest.mark.parametrize(
    "made",
    [
        closed(STREAM),
        closed(sse(*OPENAI_TEXT, end="\r\n")),
        closed(b": hello\n\n" + STREAM.replace(b"data:", b": note\nevent: x\nid: 7\nretry: 5\ndata:")),
        closed(sse(*OPENAI_TEXT[:-1])),  # without [DONE]
        closed(sse(*OPENAI_TEXT[:-1]) + b"data: [DO"),
        sized(STREAM, len(STREAM)),
        sized(STREAM, 10 * len(STREAM)),  # less
        chunked(STREAM[:7], STREAM[7:]),
        chunked(STREAM, end=b"0\r\nx-trailer: 1\r\nx-other: 2\r\n\r\n"),
        chunked(*(bytes([byte]) for byte in STREAM)),
        closed(STREAM, HEAD + b"content-type: text/event-stream; charset=utf-8\r\n"),
    ],
)
async def test_unusual_answers_are_read(gateway: Make, provider: RawProvider, made: list[bytes]) -> None:
    site = await gateway(retries=0)
    provider.make = lambda: made
    for _ in range(2):  # also on the same connection, if it is kept
        answer = await site.ask()
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == SAID, answer.text


CLOSED = HEAD + b"connection: close\r\n\r\n"
ONE_CHUNK = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\ndata: " % (HUGE + 6)
BOMB = gzip.compress(b"data: " + bytes(HUGE))
LOCATION = b"location: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
JSON, HTML = (HEAD.replace(b"text/event-stream", kind) for kind in (b"application/json", b"text/html"))
BROKEN: list[tuple[Callable[[], Iterable[bytes]], str, str]] = [
    (lambda: closed(b'{"choices": []}', JSON), "stream_broken", "sent application/json"),
    (lambda: closed(b"<html>" * 9999, HTML), "stream_broken", "sent text/html"),
    (lambda: closed(STREAM, b"HTTP/1.1 200 OK\r\n"), "stream_broken", "in the place of an event stream"),
    (lambda: closed(BOMB, HEAD + b"content-encoding: gzip\r\n"), "stream_broken", "ended before"),
    (lambda: closed(HALF), "stream_broken", "ended before the answer was complete"),
    (lambda: sized(HALF, 5 * len(HALF)), "connection_failed", ""),
    (lambda: sized(STREAM + b"more", len(STREAM)), "connection_failed", ""),
    (lambda: chunked(HALF, end=b"zz\r\n"), "connection_failed", ""),
    (lambda: closed(HALF + b"data: {\xff\xfe\n\n"), "stream_broken", "cannot be read"),
    (lambda: closed(HALF + b"data: \xff\n\n"), "stream_broken", "cannot be read"),
    (lambda: closed(HALF + b"data: [1, 2]\n\n"), "stream_broken", "cannot be read"),
    (lambda: closed(sse(delta(content={"a": "x" * 9999}))), "stream_broken", "cannot be read"),
    (lambda: flood(CLOSED, b"\n"), "stream_broken", "ended before"),
    (lambda: flood(CLOSED + b"data: ", b"x"), "stream_broken", "more than 1048576 bytes"),
    (lambda: flood(CLOSED, b"data: x\n"), "stream_broken", "more than 1048576 bytes"),
    (lambda: flood(ONE_CHUNK, b"x"), "stream_broken", "more than 1048576 bytes"),
    (lambda: flood(b"HTTP/1.1 200 OK\r\nx-long: ", b"x"), "connection_failed", ""),
    (lambda: flood(b"HTTP/1.1 200 OK\r\n", b"x-many: 123456\r\n"), "connection_failed", ""),
    (lambda: flood(b"HTTP/1.1 2", b"0"), "connection_failed", ""),
    (lambda: [b"hello"], "connection_failed", ""),
    (list, "connection_failed", ""),
    (lambda: [b"HTTP/1.1 302 Found\r\n" + LOCATION], "provider_failed", "HTTP 302"),
    (lambda: [b"HTTP/1.1 307 Moved\r\n" + LOCATION], "provider_failed", "HTTP 307"),
    (lambda: flood(b"HTTP/1.1 500 No\r\n\r\n", b"x"), "provider_failed", "HTTP 500"),
]


@pytest.mark.parametrize(("make", "code", "says"), BROKEN)
async def test_what_is_no_answer_is_one_bounded_error(
    gateway: Make, provider: RawProvider, make: Callable[[], Iterable[bytes]], code: str, says: str
) -> None:
    site = await gateway(retries=0)
    provider.make = make
    answer = await asyncio.wait_for(site.ask(), 30)
    error = answer.json()["error"]
    assert answer.status_code == 502 and says in error["message"] and len(error["message"]) < 500, answer.text
    assert code in error["code"] and KEY not in answer.text, answer.text
    assert provider.requests == 1
    assert provider.sent < HUGE // 2 or "ended before" in says  # the rest is not read


async def test_a_stream_without_end_is_ended(gateway: Make, provider: RawProvider) -> None:
    site = await gateway(retries=0, idle_timeout=0.3, first_token_timeout=0.3, server={"max_answer_bytes": 1 << 20})
    provider.make = lambda: [*closed(b""), *itertools.repeat(b": still here\n\n", 10_000_000)]
    answer = await asyncio.wait_for(site.ask(), 30)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "provider_timeout"
    provider.make = lambda: itertools.chain(closed(b""), itertools.repeat(sse(delta(content="x" * 1000))))
    answer = await asyncio.wait_for(site.ask(), 30)
    assert answer.status_code == 502 and "more than" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("status", [200, 400, 401, 404, 429, 500])
async def test_a_key_that_a_provider_repeats_is_not_shown(
    gateway: Make, provider: RawProvider, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = {"error": {"message": f"wrong key {KEY}, and Bearer {KEY}" + " again" * 99}}
    plain = f"HTTP/1.1 {status} x\r\n\r\n".encode()
    heads = [plain] if status != 200 else [plain, HEAD + b"\r\n", HEAD + b"\r\n" + HALF]
    for head in heads:
        site = await gateway(retries=0)
        body = json.dumps(said).encode()
        provider.make = lambda data=head + (b"data: " + body + b"\n\n" if HEAD in head else body): [data]  # type: ignore[misc]
        for stream in (False, True):
            answer = await site.ask(stream=stream)
            assert "error" in answer.text and KEY not in answer.text and KEY[:-1] not in answer.text
            assert status in (401, 429) or "(key)" in answer.text, answer.text
    assert KEY not in caplog.text


async def test_counts_that_cannot_be_are_the_nearest_that_can(gateway: Make, provider: RawProvider) -> None:
    site = await gateway(retries=0)
    for count, wanted in ((-5, 0), (10**30, 100_000_000), (None, 0)):
        usage = {"prompt_tokens": count, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": count}}
        provider.make = lambda usage=usage: closed(sse(*OPENAI_TEXT[:-2], {"choices": [], "usage": usage}, "[DONE]"))  # type: ignore[misc]
        answer = (await site.ask()).json()
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["completion_tokens"] == wanted
