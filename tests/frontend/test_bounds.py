"""Requests made to cost far more than their bytes: a 4xx, and memory is given back."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.frontend import RequestLimits
from penstock.frontend.errors import APIError
from penstock.frontend.http.json_scan import JsonScan
from penstock.text import Tokenizer
from tests.frontend.conftest import NAME, Site, live
from tests.frontend.http.raw import connection, request, status_of
from tests.frontend.loop_time import Record
from tests.patience import PATIENCE, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIB4 = 4 << 20


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


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": 1, "b": {"a": 2}}', '{"a": 1, "a": 2}', '[{"a:": 1, "a": ":"}, {"b": 1, "b": ":"}]'),
        *('{"a": 1, "\\u0061": 2}', '{"a": {"b": "\\u003a", "b": 1}}', '{"a\\n": 1, "a\\n": ":"}', '{"a": 1, "a": 2'),
        *('{"a": "\\"", "b": "\\\\"}', '["a", "b", "c", "d"]', "[[[[[]]]]]", "[{}, {}, {}]", "[1, 2, 3, 4, 5]"),
        *('{"a": NaN, "a": 1}', '{"é": 1, "é": 2}', "\ufeff{}", '"a', "1", "{}, {}"),
    ],
)
def test_a_small_text_gets_the_verdict_of_a_scan(text: str) -> None:
    """The same text behind more spaces than a small one has is scanned."""
    limits = RequestLimits(max_json_strings=3, max_json_containers=3, max_json_values=3, max_json_depth=4)
    found = []
    for sent in (text, " " * 2000 + text):
        try:
            JsonScan(limits).feed(sent.encode())
        except APIError as error:
            found.append(error.message)
        else:
            found.append("")
    assert found[0] == found[1]


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
async def test_answers_are_bounded_in_bytes(
    make_site: Callable[..., Site], fields: dict[str, Any], record_property: Record
) -> None:
    site = make_site(max_model_len=3_000_000)
    before, began = resident(), time.monotonic()
    response = await site.http.post(COMPLETIONS, json=fields)
    record_property("refused_after_ms", round(1000 * (time.monotonic() - began), 1))
    record_property("memory_mb", round((resident() - before) / 1e6, 1))
    record_property("request_bytes", len(response.request.content))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "answer_too_large"
    assert "n = 32" in error["message"] and "--max-answer-size" in error["message"]
    if size := re.search(r"an answer of up to (\d+) bytes", error["message"]):
        record_property("answer_mb_refused", round(int(size[1]) / 1e6))
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
        await until(lambda: site.app.bodies.used >= 4_000_000)
        reader, writer = await stack.enter_async_context(connection(port))
        writer.write(sent[:-1])
        head, _, answer = (await asyncio.wait_for(reader.read(), PATIENCE)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after" in head
        assert json.loads(answer)["error"]["code"] == "too_many_bodies"
        for _, writer in held[:2]:
            writer.close()
        await until(lambda: site.app.lifecycle.requests == 2)
        for reader, writer in held[2:]:
            writer.write(sent[-1:])
            assert await asyncio.wait_for(status_of(reader), PATIENCE) == 400  # tokenize does not take `user`
        async with httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{port}/tokenize"
            assert (await http.post(url, json={"prompt": "hello"})).status_code == 200


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


HOLDER = """
import socket, sys
port, count = map(int, sys.argv[1:])
sent = sys.stdin.buffer.read()
held = []
for _ in range(count):
    held.append(socket.create_connection(("127.0.0.1", port)))
    try:
        held[-1].sendall(sent)
    except OSError:  # refused
        pass
print("sent", flush=True)
held[0].recv(1)  # the test ends this process
"""


async def test_memory_of_bodies_is_given_back(site: Site, record_property: Record) -> None:
    """Many connections hold back the last byte of their bodies, which together are far more than the budget."""
    sent = request("/tokenize", {"prompt": "hello", "user": "x" * (MIB4 - 1000)})[:-1]
    connections = 160
    async with live(site) as port:
        before = resident()
        holder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOLDER, str(port), str(connections)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write(sent)
        holder.stdin.close()
        assert await asyncio.wait_for(holder.stdout.readline(), 300)
        during = resident()
        assert site.app.bodies.used <= 256 << 20 and during < before + (400 << 20)
        holder.kill()
        await holder.wait()
        await until(lambda: site.app.lifecycle.requests == 0)
        began = time.monotonic()
        await until(lambda: resident() < before + (48 << 20))
        record_property("connections", connections)
        record_property("given_back_s", round(time.monotonic() - began, 1))
        for name, size in (("before", before), ("during", during), ("after", resident())):
            record_property(f"{name}_mib", size >> 20)
            print(f"{name}: {size >> 20} MiB")


UNREADER = """
import signal, socket, sys
port, count = map(int, sys.argv[1:])
sent = sys.stdin.buffer.read()
held = []
for _ in range(count):
    held.append(socket.socket())
    held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    held[-1].connect(("127.0.0.1", port))
    held[-1].sendall(sent)
print(*(sock.recv(13)[9:12].decode() for sock in held), flush=True)
signal.alarm(120)
signal.pause()  # the test ends this process
"""
PROMPT_ROWS = {"prompt": [[60] * 900], "max_tokens": 1, "n": 8, "prompt_logprobs": 20}  # more than sockets hold


async def test_unread_answers_have_one_budget(make_site: Callable[..., Site], record_property: Record) -> None:
    """Clients that read none of their large answers: most are refused before the engine gets their requests, and the
    others are disconnected."""
    most, clients = 40 << 20, 20
    limits = RequestLimits(max_unread_bytes=most, write_timeout=4.0)
    site = make_site(max_model_len=1000, limits=limits)
    whole = len((await site.http.post(COMPLETIONS, json=PROMPT_ROWS)).content)
    assert whole > 7_000_000
    async with live(site) as port:
        before, asked = resident(), len(site.engine.requests)
        reader = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", UNREADER, str(port), str(clients)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert reader.stdin is not None and reader.stdout is not None
            reader.stdin.write(request(COMPLETIONS, PROMPT_ROWS))
            reader.stdin.close()
            peak = 0
            statuses = asyncio.create_task(reader.stdout.readline())
            while not statuses.done():
                peak = max(peak, site.app.unread.used)
                await asyncio.sleep(0.01)
            answers = statuses.result().split()
            during = resident()
            assert len(answers) == clients and set(answers) == {b"200", b"429"}
            assert answers.count(b"200") == len(site.engine.requests) - asked <= clients / 2
            assert 0 < peak <= most and during < before + 4 * most
            assert site.app.lifecycle.requests <= answers.count(b"200")
            await until(lambda: site.app.lifecycle.requests == 0)  # write_timeout
            assert site.app.unread.used == 0
            async with httpx.AsyncClient(timeout=60) as http:
                answer = await http.post(f"http://127.0.0.1:{port}{COMPLETIONS}", json=PROMPT_ROWS)
            assert answer.status_code == 200 and len(answer.content) == whole and site.app.unread.used == 0
        finally:
            reader.kill()
            await reader.wait()
        record_property("clients", clients)
        record_property("refused", answers.count(b"429"))
        record_property("answer_mb", round(whole / 1e6, 1))
        record_property("grown_mb", round((during - before) / 1e6, 1))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_grows_beyond_what_is_left_is_refused(
    make_site: Callable[..., Site], stream: bool
) -> None:
    """The log-probabilities of new tokens are not known before; small answers do not count."""
    most = 1 << 20
    site = make_site(max_model_len=2000, limits=RequestLimits(max_unread_bytes=most, max_answer_bytes=most))
    others = site.app.unread.hold()
    others.add_made(most - (64 << 10))
    fields = {"prompt": "a", "max_tokens": 400, "logprobs": 20, "stream": stream}
    response = await site.http.post(COMPLETIONS, json=fields)
    if stream:  # it is sent as it grows
        assert response.status_code == 200 and response.content.endswith(b"data: [DONE]\n\n")
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_unread")
        assert "retry-after" in response.headers and "65536 bytes" not in response.text
        await until(lambda: site.engine.running == 0)
    assert (await site.post(COMPLETIONS, prompt="a", max_tokens=4, logprobs=20))["choices"]
    others.release()
    assert (await site.http.post(COMPLETIONS, json=fields)).status_code == 200
    assert site.app.unread.used == 0


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
        head, _, answer = (await asyncio.wait_for(reader.read(), PATIENCE)).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status and b"connection: close" in head
    assert words.lower() in json.loads(answer)["error"]["message"].lower()


async def test_the_same_host_twice_over_is_no_doubt(site: Site) -> None:
    async with live(site) as port, connection(port) as (reader, writer):
        writer.write(f"GET http://127.0.0.1:{port}/v1/models HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert await asyncio.wait_for(status_of(reader), PATIENCE) == 200


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
