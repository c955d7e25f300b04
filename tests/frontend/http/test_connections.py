"""Real sockets: clients that go, stall, flood or do not read."""

import asyncio
import contextlib
import gc
import json
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.frontend import RequestLimits
from penstock.frontend.call import RequestContext
from penstock.frontend.http.asgi import RequestInfo
from penstock.frontend.http.connection import BoundedProtocol
from tests.frontend.conftest import Site, live, parse_events
from tests.frontend.http.raw import connection, event_loop_policy, next_answer, request, reset, status_of
from tests.patience import PATIENCE, until

__all__ = ["event_loop_policy"]

PROMPT = {"prompt": "hello", "max_tokens": 60}
USER = {"messages": [{"role": "user", "content": "hello"}]}
CALLS = [
    ("/v1/completions", {**PROMPT, "stream": True}),
    ("/v1/completions", PROMPT),
    ("/v1/completions", {**PROMPT, "prompt": ["a", "b"], "n": 2}),
    ("/v1/chat/completions", {**USER, "stream": True}),
    ("/v1/chat/completions", USER),
]


@pytest.mark.parametrize(("path", "fields"), CALLS)
@pytest.mark.parametrize("leave", [lambda writer: writer.close(), reset], ids=["close", "reset"])
async def test_a_client_that_goes_is_aborted(
    site: Site, path: str, fields: dict[str, Any], leave: Callable[[asyncio.StreamWriter], None]
) -> None:
    site.engine.gate = asyncio.Event()
    async with live(site) as port:
        async with connection(port) as (reader, writer):
            writer.write(request(path, fields))
            await until(lambda: bool(site.engine.running))
            if fields.get("stream"):
                assert await status_of(reader) == 200
            running = site.engine.running
            leave(writer)
            await until(lambda: site.engine.running == 0)
        assert sorted(site.engine.aborted) == sorted(call.request_id for call in site.engine.requests)
        assert len(site.engine.aborted) == running
        await until(lambda: site.app.lifecycle.requests == 0)
        site.engine.gate.set()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200
            metrics = (await http.get("/metrics")).text
    assert f'code="499",method="POST",route="{path}"' in metrics
    choices = running * fields.get("n", 1)
    assert f'penstock_request_success_total{{finished_reason="abort",model_name="tiny"}} {choices}.0' in metrics


async def test_what_a_request_had_is_freed_at_once(site: Site) -> None:
    """Also its body if it is refused: nothing waits until Python looks for objects that have each other."""

    def held() -> set[int]:
        return {id(each) for each in gc.get_objects() if issubclass(type(each), (RequestInfo, RequestContext))}

    gc.collect()
    gc.disable()
    before = held()  # other tests have them
    try:
        async with live(site) as port, connection(port) as (reader, writer):
            for fields, status in ((PROMPT, 200), ({**PROMPT, "prompt": 1}, 400), ({"model": "other", **PROMPT}, 404)):
                for _ in range(5):
                    writer.write(request("/v1/completions", fields))
                    assert (await next_answer(reader))[0] == status
                await until(lambda: site.app.lifecycle.requests == 0)
                assert len(held() - before) <= 1, fields  # the connection has its last request
    finally:
        gc.enable()


async def test_many_clients_that_go_leave_nothing_behind(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    async with live(site) as port:
        async with httpx.AsyncClient() as http:
            await http.get(f"http://127.0.0.1:{port}/health")
        tasks = asyncio.all_tasks()
        for _ in range(5):
            async with contextlib.AsyncExitStack() as stack:
                for path, fields in CALLS * 4:
                    _, writer = await stack.enter_async_context(connection(port))
                    writer.write(request(path, fields))
                await until(lambda: site.app.lifecycle.requests == 20)
            await until(lambda: site.app.lifecycle.requests == 0 and site.engine.running == 0)
        await until(lambda: asyncio.all_tasks() <= tasks)


async def test_a_client_that_goes_while_sending(site: Site) -> None:
    async with live(site) as port:
        async with connection(port) as (_, writer):
            writer.write(request("/v1/completions", PROMPT)[:-5])
            await until(lambda: site.app.lifecycle.requests == 1)
        await until(lambda: site.app.lifecycle.requests == 0)
    assert site.engine.requests == []


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: loc", b"POST /v1/completions HTTP/1.1\r\n"])
async def test_slow_headers_end_the_connection(make_site: Callable[..., Site], sent: bytes) -> None:
    site = make_site(limits=RequestLimits(header_timeout=0.2))
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""


async def test_a_slow_body_gets_an_answer_and_the_connection_ends(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(body_timeout=0.2))
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(request("/v1/completions", PROMPT)[:-5])
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"error"' in answer
    assert site.app.lifecycle.requests == 0


async def test_a_body_that_never_ends_is_cut_off_after_its_refusal(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(max_body_bytes=1000, header_timeout=1.0, body_timeout=1.0))
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(CHUNKED + b"\r\n\r\n")
        writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert await asyncio.wait_for(status_of(reader), PATIENCE) == 413
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), PATIENCE)


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nx-long: ", b"GET /health?", b"GET /health HTTP/1.1\r\n"])
async def test_headers_beyond_the_limit(make_site: Callable[..., Site], start: bytes) -> None:
    site = make_site(limits=RequestLimits(max_header_bytes=1000))
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(start + b"y" * 600)
        await asyncio.sleep(0.05)
        writer.write(b"y" * 600)
        assert await asyncio.wait_for(status_of(reader), PATIENCE) == 431
        await asyncio.wait_for(reader.read(), PATIENCE)  # and the connection ends


async def test_head_and_body_of_an_answer_are_one_packet(site: Site) -> None:
    """Also behind 100 Continue. The answer to HEAD has a length and no body."""
    post = request("/v1/completions", {"prompt": "hello", "max_tokens": 1})
    async with live(site) as port, connection(port) as (reader, writer):

        def packets() -> int:
            """How many with data have arrived."""
            facts = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
            return int.from_bytes(facts[152:156], sys.byteorder)

        async def ask(sent: bytes) -> tuple[bytes, bytes]:
            before = packets()
            writer.write(sent)
            head, _, body = (await asyncio.wait_for(reader.read(1 << 16), PATIENCE)).partition(b"\r\n\r\n")
            assert packets() == before + 1
            return head, body

        head, body = await ask(post)
        assert head.startswith(b"HTTP/1.1 200 ") and len(body) == int(head.split(b"content-length: ")[1].split()[0]) > 0
        start, _, sent = post.partition(b"\r\n\r\n")
        assert await ask(start + b"\r\nexpect: 100-continue\r\n\r\n") == (b"HTTP/1.1 100 Continue", b"")
        head, body = await ask(sent)
        assert head.startswith(b"HTTP/1.1 200 ") and json.loads(body)["object"] == "text_completion"
        head, body = await ask(b"HEAD /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"content-length: 0" not in head and not body
        assert (await ask(post))[0].startswith(b"HTTP/1.1 200 ")


async def test_large_bodies_within_the_limit_are_no_large_headers(site: Site) -> None:
    async with live(site) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for _ in range(3):  # on one connection
            response = await http.post("/tokenize", json={"prompt": "hello", "model": "m" * 300_000})
            assert response.status_code == 404


CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked"
MALFORMED = {
    "bytes": (b"\x00\x01\x02\r\n\r\n", "invalid method"),
    "no target": (b"GET\r\n\r\n", "not a valid HTTP request"),
    "version": (b"GET / HTTP/9.9\r\n\r\n", "invalid http version"),
    "http2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "speaks HTTP/2"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00", "use http:// and not https://"),
    "method": (b"BREW / HTTP/1.1\r\nhost: localhost\r\n\r\n", "invalid method"),
    "target": (b"GET \xff HTTP/1.1\r\n\r\n", "not a valid HTTP request"),
    "authority": (b"CONNECT example.com:443 HTTP/1.1\r\n\r\n", "not a path"),
    "header": (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", "invalid header token"),
    "length": (b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n", "content-length"),
    "chunk": (CHUNKED + b"\r\n\r\nzz\r\n", "chunk size"),
    "chunk and length": (CHUNKED + b"\r\ncontent-length: 5\r\n\r\n", "can't be present"),
}


async def refusal(port: int, sent: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the error of the answer to these bytes, after which the server closes the connection."""
    async with connection(port) as (reader, writer):
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE)).partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head and b"connection: close" in head
        assert f"content-length: {len(body)}".encode() in head
        answer = json.loads(body)
        assert list(answer) == ["error"] and list(answer["error"]) == ["message", "type", "param", "code"]
        return int(head.split()[1]), answer["error"]


async def test_malformed_http_gets_an_error_of_the_documented_shape(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with live(site) as port:
        for name, (sent, reason) in MALFORMED.items():
            status, error = await refusal(port, sent)
            assert (name, status, error["type"], error["code"]) == (name, 400, "invalid_request_error", "invalid_http")
            assert reason in error["message"], name
        status, error = await refusal(port, b"GET / HTTP/1.1\r\nx: " + b"y" * 2_000_000 + b"\r\n\r\n")
        assert (status, error["code"]) == (431, "headers_too_large")
        assert "65536 bytes" in error["message"]
    assert site.app.lifecycle.requests == 0
    lines = [record.fields for record in caplog.records if record.name == "penstock.access"]
    refused = [line for line in lines if line["status"] in (400, 431)]
    assert len(refused) == len(MALFORMED) + 1
    assert all(line["client"].startswith("127.0.0.1:") for line in refused)
    assert "Invalid HTTP request received" not in caplog.text


async def test_garbage_behind_a_request_does_not_break_into_its_answer(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(request("/v1/completions", {**PROMPT, "stream": True}))
        await until(lambda: site.engine.running == 1)
        writer.write(b"BREW / HTTP/1.1\r\n\r\n")
        assert b"error" not in await asyncio.wait_for(reader.read(), PATIENCE)
        await until(lambda: site.engine.running == 0)


async def test_pipelined_requests_outlast_the_timeouts_of_receiving(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(header_timeout=0.6, body_timeout=0.6))
    site.engine.gate = asyncio.Event()
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(request("/v1/completions", PROMPT) + request("/v1/completions", PROMPT)[:-5])
        await until(lambda: site.engine.running == 1)
        await asyncio.sleep(1.5)
        site.engine.gate.set()
        assert await asyncio.wait_for(status_of(reader), PATIENCE) == 200


async def test_a_client_that_does_not_read_is_cut_off(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(write_timeout=0.2), max_model_len=2_000_000)
    async with live(site) as port, connection(port) as (_, writer):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()
        writer.write(request("/v1/completions", {**PROMPT, "max_tokens": 1_500_000, "stream": True}))
        await until(lambda: site.engine.running == 1)
        await until(lambda: site.engine.running == 0)
        assert site.engine.aborted == [site.engine.requests[0].request_id]


async def test_a_small_unread_answer_does_not_keep_a_connection(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One below the size at which writing pauses, so that no timer has begun before the connection is to be closed."""
    made: list[BoundedProtocol] = []
    begin = BoundedProtocol.connection_made

    def noted(self: BoundedProtocol, transport: asyncio.Transport) -> None:
        made.append(self)
        begin(self, transport)

    monkeypatch.setattr(BoundedProtocol, "connection_made", noted)
    site = make_site(limits=RequestLimits(write_timeout=0.5, keep_alive_timeout=1.0))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with live(site) as port:
            client.connect(("127.0.0.1", port))
            await until(lambda: bool(made))
            (protocol,) = made
            transport = protocol.transport
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            transport.write(b"x" * 40_000)  # as an answer of which the sockets hold a part
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await until(lambda: protocol.cycle is not None and protocol.cycle.response_complete)
            assert 0 < transport.get_write_buffer_size() < 65_536 and not protocol.flow.write_paused
            await until(lambda: protocol not in protocol.connections)


async def test_a_client_that_goes_is_aborted_even_if_its_next_request_waits(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    async with live(site) as port:
        async with connection(port) as (reader, writer):
            writer.write(request("/v1/completions", {**PROMPT, "stream": True}) * 2)
            assert await asyncio.wait_for(status_of(reader), PATIENCE) == 200
            assert site.engine.running == 1
        await until(lambda: site.engine.running == 0 and site.app.lifecycle.requests == 0)
    assert len(site.engine.requests) == 1


async def test_garbage_behind_waiting_requests_does_not_break_into_an_answer(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    async with live(site) as port, connection(port) as (reader, writer):
        sent = request("/v1/completions", {**PROMPT, "stream": True})
        writer.write(sent + CHUNKED + b"\r\n\r\n")
        await until(lambda: site.engine.running == 1)
        writer.write(b"zz\r\n")
        assert b"invalid_http" not in await asyncio.wait_for(reader.read(), PATIENCE)
        await until(lambda: site.engine.running == 0)


async def test_few_requests_wait_on_a_connection(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(max_pipelined=3))
    site.engine.gate = asyncio.Event()
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(request("/v1/completions", PROMPT) * 4)
        await until(lambda: site.engine.running == 1)
        await asyncio.sleep(0.1)
        site.engine.gate.set()
        for _ in range(4):
            assert (await next_answer(reader))[0] == 200


@pytest.mark.parametrize(("path", "error"), [("/v1/completions", "code"), ("/v1/messages", "type")])
async def test_a_request_too_many_is_refused_after_the_earlier_answers(
    make_site: Callable[..., Site], path: str, error: str
) -> None:
    site = make_site(limits=RequestLimits(max_pipelined=3))
    site.engine.gate = asyncio.Event()
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(request("/v1/completions", PROMPT) + b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3)
        writer.write(request(path, PROMPT)[:-5])
        await until(lambda: site.engine.running == 1)
        writer.write(b"x" * 100_000 + request("/v1/completions", PROMPT))  # is not read
        site.engine.gate.set()
        for _ in range(4):
            assert (await next_answer(reader))[0] == 200
        status, head, body = await next_answer(reader)
        assert status == 429 and b"retry-after: " in head and b"connection: close" in head
        assert "the limit is 3" in body["error"]["message"]
        assert body["error"][error] == {"code": "too_many_pipelined", "type": "rate_limit_error"}[error]
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        await until(lambda: site.app.lifecycle.requests == 0)
    assert len(site.engine.requests) == 1


@pytest.mark.parametrize(("path", "fields"), CALLS)
async def test_http_1_0_has_no_chunked_coding(site: Site, path: str, fields: dict[str, Any]) -> None:
    """The end of the connection is the end of the answer."""
    site.says("hello world")
    answers = {}
    async with live(site) as port:
        for version in (b"1.0", b"1.1"):
            async with connection(port) as (reader, writer):
                close = b"connection: close\r\n" if version == b"1.1" else b""
                sent = request(path, fields).replace(b"HTTP/1.1\r\n", b"HTTP/" + version + b"\r\n" + close)
                writer.write(sent)
                head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head
            answers[version] = head, body
    head, body = answers[b"1.0"]
    assert b"chunked" not in head
    if fields.get("stream"):
        assert b"chunked" in answers[b"1.1"][0] and parse_events(body)
    else:
        assert json.loads(body)["choices"]
