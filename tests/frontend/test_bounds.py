"""Requests made to cost far more than their bytes: a 4xx, and the event loop stays free."""

import asyncio
import asyncio.events
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.frontend import RequestLimits
from penstock.frontend.errors import APIError
from penstock.frontend.http.json_scan import JsonScan
from penstock.text import Tokenizer
from tests.frontend.conftest import NAME, Site, live, until
from tests.frontend.http.test_connections import connection, request, status_of
from tests.frontend.loop_time import LONGEST, TRIES, assert_loop_stays_free, callbacks, report

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIB4 = 4 << 20


def body(before: bytes, unit: bytes, after: bytes) -> bytes:
    """As many units as a body of 4 MiB has room for."""
    return before + unit * ((MIB4 - len(before) - len(after) - 1) // len(unit)) + after


BOMBS = {
    "lists": (COMPLETIONS, body(b'{"prompt":[[]', b",[]", b"]}")),
    "bias": (COMPLETIONS, b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(380_000)) + b"}}"),
    "messages": (CHAT, body(b'{"messages":[{"role":"user"}', b',{"role":"user","content":""}', b"]}")),
    "kwargs": (CHAT, body(b'{"messages":[],"chat_template_kwargs":{"a":[{}', b",{}", b"]}}")),
    "strings": (COMPLETIONS, body(b'{"prompt":["a"', b',"a"', b"]}")),
    "numbers": (COMPLETIONS, body(b'{"prompt":[1', b",1", b"]}")),
    "depth": (COMPLETIONS, body(b'{"user":', b"[", b"")),
}

SENDER = """
import os, socket, sys, threading
port, path, each = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
body = sys.stdin.buffer.read()
head = f"POST {path} HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\n"
head += f"content-length: {len(body)}\\r\\n\\r\\n"
def send():
    with socket.create_connection(("127.0.0.1", port)) as sock:
        try:
            sock.sendall(head.encode() + body)
        except OSError:
            pass
        os.write(1, sock.recv(4096).split(b" ")[1] + b"\\n")
threads = [threading.Thread(target=send) for _ in range(each)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


async def send_from_outside(port: int, path: str, sent: bytes, count: int) -> list[bytes]:
    """The statuses of `count` requests at once, from another process."""
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SENDER, str(port), path, str(count)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    answers, _ = await asyncio.wait_for(sender.communicate(sent), 300)
    return answers.split()


@pytest.mark.parametrize("name", BOMBS)
async def test_no_body_holds_the_loop(site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sent = BOMBS[name]
    assert len(sent) <= MIB4
    async with live(site) as port:
        for _ in range(TRIES):
            with monkeypatch.context() as patched, callbacks(patched) as held:
                assert await send_from_outside(port, path, sent, 8) == [b"400"] * 8
            slower = report(name, held)
            if held[-1] < LONGEST * slower and held[-len(held) // 100 - 1] < 0.005 * slower:
                return
    raise AssertionError(f"a body holds the loop for {held[-1]:.3f} s")


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b'{"prompt":[' + b"[]," * 8192 + b"[]]}", ["8192 arrays and objects"]),
        (b'{"prompt":[' + b'"a",' * 16_384 + b'"a"]}', ["16384 strings"]),
        (b'{"prompt":[' + b"1," * 150_001 + b"1]}", ["150000 values"]),
        (b'{"user":' + b"[" * 64, ["more than 64 deep"]),
        (b'{"prompt":"a","prompt":"b"}', ["'prompt' twice"]),
        (b'{"prompt":"a", "pr\\u006fmpt" : "b"}', ["'prompt' twice"]),
        (b'{"prompt":"a","metadata":{"\\"":"","x":"\\"","\\"":1}}', ["twice"]),
        (b'{"prompt":"a","temperature":NaN}', ["NaN at byte 28"]),
        (b'{"prompt":"a","temperature":-Infinity}', ["-Infinity at byte 28"]),
        (b'{"prompt":"\\ud83d and more"}', ["\\ud83d", "half of a surrogate pair"]),
        (b'{"prompt":"\xed\xa0\x80"}', ["surrogate at byte 11"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
async def test_the_error_names_it(site: Site, sent: bytes, words: list[str]) -> None:
    response = await site.http.post(COMPLETIONS, content=sent, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert all(word in response.json()["error"]["message"] for word in words), response.text


def test_a_scan_does_not_depend_on_how_the_text_is_cut() -> None:
    good = json.dumps({'a"\\': ["[{,:", {"b\\": "\\\\", "c": {}}, 'x"'], "é\u2028": '":"', "d": [[], [1, 2.5, None]]})
    bad = '{"a\\\\": 1, "b" :{"a\\\\":2}, "a\\u005c" : 3}'
    for cut in range(1, len(good.encode())):
        scan = JsonScan(RequestLimits(max_json_strings=12, max_json_containers=7, max_json_values=8, max_json_depth=4))
        scan.feed(good.encode()[:cut])
        scan.feed(good.encode()[cut:])
    for cut in range(1, len(bad)):
        scan = JsonScan(RequestLimits())
        with pytest.raises(APIError, match="twice"):
            list(map(scan.feed, (bad[:cut].encode(), bad[cut : cut + 1].encode(), bad[cut + 1 :].encode())))


async def test_large_bodies_of_ordinary_requests_are_read(make_site: Callable[..., Site]) -> None:
    site = make_site(max_model_len=300_000)
    text = 'a "quoted" \\ [text], {with: everything},\n' * 1000
    chat = {"messages": [{"role": role, "content": "hi"} for role in ("user", "assistant")] * 1500}
    await site.post(COMPLETIONS, prompt=text, max_tokens=1)
    await site.post(COMPLETIONS, prompt=[60] * 140_000, max_tokens=1)
    await site.post(CHAT, **chat, max_tokens=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 8, "n": 32, "max_tokens": 1000, "logprobs": 20},
        {"prompt": [[60] * 1000] * 8, "n": 32, "max_tokens": 0, "echo": True, "logprobs": 20},
        {"prompt": [[60] * 1000] * 8, "n": 32, "max_tokens": 1, "prompt_logprobs": 20},
        {"prompt": ["a"] * 8, "n": 32, "max_tokens": 100_000},
        {"prompt": "a" * 2_000_000, "n": 32, "max_tokens": 1, "echo": True},
    ],
)
async def test_answers_are_bounded_in_bytes(make_site: Callable[..., Site], fields: dict[str, Any]) -> None:
    site = make_site(max_model_len=3_000_000)
    response = await site.http.post(COMPLETIONS, json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "answer_too_large"
    assert "n = 32" in error["message"] and "--max-answer-size" in error["message"]
    assert not site.engine.requests


async def test_a_missing_max_tokens_is_what_fits(make_site: Callable[..., Site]) -> None:
    site = make_site(max_model_len=10_000, limits=RequestLimits(max_answer_bytes=1_000_000))
    await site.post(CHAT, messages=[{"role": "user", "content": "a"}], n=4, logprobs=True, top_logprobs=20)
    assert site.engine.requests[-1].sampling.max_tokens == 1_000_000 // (4 * 2108)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_a_text_of_far_too_many_tokens_is_not_encoded_to_its_end(
    make_site: Callable[..., Site], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **named: bool) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **named)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    site = make_site(max_model_len=5000)
    text = "1" * (256 * 5000 - 1000)
    fields = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    response = await site.http.post(path, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert f"more than {32768 if path == '/tokenize' else 10000} tokens" in response.json()["error"]["message"]
    assert sum(encoded) < 65_600


async def test_bodies_have_one_budget(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(max_buffered_bytes=4 << 20))
    sent = request("/tokenize", {"prompt": "hello", "user": "x" * 1_000_000})
    async with live(site) as port, contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connection(port)) for _ in range(4)]
        for _, writer in held:
            writer.write(sent[:-1])
            await writer.drain()
        await asyncio.sleep(0.3)
        reader, writer = await stack.enter_async_context(connection(port))
        writer.write(sent[:-1])
        head, _, answer = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after" in head
        assert json.loads(answer)["error"]["code"] == "too_many_bodies"
        for _, writer in held[:2]:
            writer.close()
        await until(lambda: site.app.lifecycle.in_flight == 2)
        for reader, writer in held[2:]:
            writer.write(sent[-1:])
            assert await asyncio.wait_for(status_of(reader), 10) == 400  # tokenize does not take `user`
        async with httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{port}/tokenize"
            assert (await http.post(url, json={"prompt": "hello"})).status_code == 200


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


async def test_memory_of_bodies_is_given_back(site: Site) -> None:
    sent = request("/tokenize", {"prompt": "hello", "user": "x" * (MIB4 - 1000)})
    async with live(site) as port:
        before = resident()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(80):  # more than the budget
                _, writer = await stack.enter_async_context(connection(port))
                writer.write(sent[:-1])
            await asyncio.sleep(1)
            during = resident()
        del writer
        await until(lambda: site.app.lifecycle.in_flight == 0)
        await until(lambda: resident() < before + (48 << 20), 5)
        print(f"{before >> 20} MiB before, {during >> 20} during, {resident() >> 20} after")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://127.0.0.1"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:3000"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
    ],
)
async def test_pages_of_other_sites_are_refused(site: Site, headers: dict[str, str], status: int) -> None:
    sent = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"} | headers
    response = await site.http.post(COMPLETIONS, content=sent, headers=headers)
    assert response.status_code == status
    untyped = site.http.build_request("POST", COMPLETIONS, content=sent)
    assert (await site.http.send(untyped)).status_code == 415


async def test_a_key_is_enough_for_pages_of_other_sites(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret")
    headers = {"origin": "https://app.example", "authorization": "Bearer secret"}
    response = await site.http.post(COMPLETIONS, json={"model": NAME, "prompt": "hello"}, headers=headers)
    assert response.status_code == 200


HOST = b"host: 127.0.0.1\r\n"
DOUBTFUL = {
    "two hosts": (b"GET /v1/models HTTP/1.1\r\n" + HOST + b"Host: evil.example\r\n\r\n", 400, "2 Host headers"),
    "authority": (b"GET http://evil.example/v1/models HTTP/1.1\r\n" + HOST + b"\r\n", 400, "different hosts"),
    "lengths": (
        b"POST /tokenize HTTP/1.1\r\n" + HOST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        *(400, "Content-Length"),
    ),
    "long": (b"GET /v1/models HTTP/1.1\r\n" + HOST + b"x: " + b"y" * 66_000 + b"\r\n\r\n", 431, "65536 bytes"),
    "many": (b"GET /v1/models HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 128 + b"\r\n", 431, "128 headers"),
}


@pytest.mark.parametrize("name", DOUBTFUL)
async def test_doubtful_framing_ends_the_connection(site: Site, name: str) -> None:
    sent, status, words = DOUBTFUL[name]
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(sent + sent)
        head, _, answer = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status and b"connection: close" in head
    assert words.lower() in json.loads(answer)["error"]["message"].lower()


async def test_the_same_host_twice_over_is_no_doubt(site: Site) -> None:
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(f"GET http://127.0.0.1:{port}/v1/models HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert await asyncio.wait_for(status_of(reader), 10) == 200


async def test_a_refused_body_is_not_read(site: Site) -> None:
    def send(port: int) -> tuple[bytes, int]:
        """The answer, and how many bytes were sent before the server ended the connection."""
        sent = 0
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            head = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"
            sock.sendall(head + b"content-length: 1000000000\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while sent < 1_000_000_000:
                    sent += sock.send(b" " * 65_536)
            return sock.recv(4096), sent

    async with live(site) as port:
        answer, sent = await asyncio.to_thread(send, port)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert sent < 20 << 20  # what the sockets hold


def within_limits(path: str, before: bytes, unit: bytes, count: int, after: bytes) -> tuple[str, bytes]:
    return path, b'{"max_tokens":1,' + before + unit * count + after


LARGEST = {  # requests that are answered
    "ids": within_limits(COMPLETIONS, b'"prompt":[1', b",60", 149_000, b"]}"),
    "echo": within_limits(COMPLETIONS, b'"echo":true,"prompt":[1', b",60", 149_000, b"]}"),
    "messages": within_limits(
        CHAT, b'"messages":[{"role":"user","content":"a"}', b',{"role":"user","content":"a"}', 4000, b"]}"
    ),
    "kwargs": within_limits(
        CHAT, b'"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":[0', b",{}", 8000, b"]}}"
    ),
}


@pytest.mark.parametrize("name", LARGEST)
async def test_no_accepted_body_holds_the_loop(
    make_site: Callable[..., Site], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sent = LARGEST[name]
    site = make_site(max_model_len=300_000)
    await site.post(path, **json.loads(sent))  # imports and caches
    async with live(site) as port:

        async def send() -> None:
            assert await send_from_outside(port, path, sent, 4) == [b"200"] * 4

        await assert_loop_stays_free(monkeypatch, send)


def wide(fields: int) -> dict[str, Any]:
    text = {"type": "string", "maxLength": 20, "description": "some text"}
    return {"type": "object", "properties": {f"field_{i}": text for i in range(fields)}, "required": []}


PATTERNS = {"allOf": [{"type": "string", "pattern": f"^(.*{letter}.*){{3}}$"} for letter in "abcdefghijkl"]}
SCHEMAS = {
    "5 kB": (wide(70), "200"),
    "60 kB": (wide(800), "200"),
    "5000 values": ({"type": "object", "properties": {"a": {"enum": [f"v{i}" for i in range(5000)]}}}, ""),
    "intersections of patterns": ({"type": "object", "properties": {"a": PATTERNS}, "required": ["a"]}, "400"),
}


@pytest.mark.parametrize("name", SCHEMAS)
async def test_no_schema_holds_the_loop(
    make_site: Callable[..., Site], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an answer and as of a tool, from several clients at once: no callback takes 5 ms of an idle processor."""
    schema, status = SCHEMAS[name]
    site = make_site(max_model_len=300_000)
    function = {"name": "f", "parameters": schema}
    asked = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
    )
    await site.post(CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=1, **LITTLE)  # imports and caches
    async with live(site) as port:
        for fields in asked:
            longest = []
            for i in range(60):  # the best one counts
                messages = [{"role": "user", "content": f"{name} {i}"}]
                sent = json.dumps({"messages": messages, "max_tokens": 1, **fields}).encode()
                with monkeypatch.context() as patched, callbacks(patched) as held:
                    answers = await send_from_outside(port, CHAT, sent, 4)
                assert not status or answers == [status.encode()] * 4
                longest.append(max(held) / report(name, held))
                if longest[-1] < 0.005:
                    break
            assert min(longest) < 0.005


LITTLE = {"tools": [{"type": "function", "function": {"name": "f", "parameters": wide(1)}}], "tool_choice": "required"}
