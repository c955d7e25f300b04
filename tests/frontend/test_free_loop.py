"""Bodies and schemas made to hold the event loop, refused and accepted ones: it stays free."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.config.facts import PoolingFacts
from tests.frontend.conftest import NAME, Site, live
from tests.frontend.loop_time import (
    LONGEST,
    P99,
    TRIES,
    Record,
    assert_loop_stays_free,
    callbacks,
    last_of_99,
    report,
)

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
async def test_no_body_holds_the_loop(
    site: Site, name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    path, sent = BOMBS[name]
    assert len(sent) <= MIB4
    async with live(site) as port:
        for _ in range(TRIES):
            with monkeypatch.context() as patched, callbacks(patched) as held:
                assert await send_from_outside(port, path, sent, 8) == [b"400"] * 8
            slower = report(name, held)
            if held[-1] < LONGEST * slower and last_of_99(held) < P99 * slower:
                report(name, held, record_property)
                return
    raise AssertionError(f"a body holds the loop for {held[-1]:.3f} s")


def within_limits(path: str, before: bytes, unit: bytes, count: int, after: bytes) -> tuple[str, bytes]:
    return path, b'{"model":"%s",' % NAME.encode() + before + unit * count + after


IDS, MANY = b'"prompt":[1', b",60"
MESSAGES, MESSAGE = b'"messages":[{"role":"user","content":"a"}', b',{"role":"user","content":"a"}'
LARGEST = {  # requests that are answered
    "ids": within_limits(COMPLETIONS, b'"max_tokens":1,' + IDS, MANY, 149_000, b"]}"),
    "echo": within_limits(COMPLETIONS, b'"max_tokens":1,"echo":true,' + IDS, MANY, 149_000, b"]}"),
    "prompts": within_limits(COMPLETIONS, b'"max_tokens":1,"prompt":[[60]', b",[60" + MANY * 2300 + b"]", 63, b"]}"),
    "messages": within_limits(CHAT, b'"max_tokens":1,' + MESSAGES, MESSAGE, 4000, b"]}"),
    "kwargs": within_limits(
        CHAT, b'"max_tokens":1,' + MESSAGES + b'],"chat_template_kwargs":{"a":[0', b",{}", 8000, b"]}}"
    ),
    "anthropic": within_limits("/v1/messages", b'"max_tokens":1,' + MESSAGES, MESSAGE, 4000, b"]}"),
    "responses": within_limits(
        "/v1/responses", b'"max_output_tokens":16,"input":[' + MESSAGE[1:], MESSAGE, 4000, b"]}"
    ),
    "ollama": within_limits("/api/chat", b'"options":{"num_predict":1},' + MESSAGES, MESSAGE, 4000, b"]}"),
    "context": within_limits(
        "/api/generate", b'"options":{"num_predict":1},"prompt":"a","context":[1', MANY, 149_000, b"]}"
    ),
}


@pytest.mark.parametrize("name", LARGEST)
async def test_no_accepted_body_holds_the_loop(
    make_site: Callable[..., Site], name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    path, sent = LARGEST[name]
    site = make_site(max_model_len=300_000)
    first = await site.http.post(path, content=sent, headers={"content-type": "application/json"})  # imports, caches
    assert first.status_code == 200, first.text
    async with live(site) as port:

        async def send() -> None:
            assert await send_from_outside(port, path, sent, 4) == [b"200"] * 4

        await assert_loop_stays_free(monkeypatch, send, P99, record_property)


EMBEDS = PoolingFacts(task="embed", mode="mean", width=384, encoder=True)
LABELS = PoolingFacts(task="classify", mode="cls", width=384, encoder=True, labels=tuple(f"l{i}" for i in range(384)))
VECTORS: dict[str, tuple[PoolingFacts, str, dict[str, Any]]] = {
    "floats": (EMBEDS, "/v1/embeddings", {}),
    "base64": (EMBEDS, "/v1/embeddings", {"encoding_format": "base64"}),
    "shortened": (EMBEDS, "/v1/embeddings", {"dimensions": 383}),
    "ollama": (EMBEDS, "/api/embed", {}),
    "labels": (LABELS, "/classify", {}),
}


@pytest.mark.parametrize("name", VECTORS)
async def test_no_vectors_hold_the_loop(
    make_site: Callable[..., Site], name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """As many as a request may have. `callbacks` measures only the loop's own thread: a thread that holds the
    interpreter delays the loop as well, so all work must be done there, in parts."""
    pooling, path, fields = VECTORS[name]
    site = make_site(pooling=pooling, max_model_len=64)
    given = {"model": NAME, "input": [f"text {i}" for i in range(2048)], **fields}
    answer = (await site.http.post(path, json=given)).json()
    rows = answer["embeddings"] if path == "/api/embed" else answer["data"]
    assert len(rows) == 2048 and len(site.engine.requests) == 2048
    if name == "floats":
        prompts = {int(call.request_id.rpartition("-")[2]): call.prompt_ids for call in site.engine.requests}
        for place, row in enumerate(rows):
            exact = np.random.default_rng(prompts[place]).standard_normal(384, np.float32)
            assert row["index"] == place and (np.array(row["embedding"], np.float32) == exact).all()
    threads: list[str] = []
    to_thread = asyncio.to_thread

    async def noted(work: Callable[..., Any], *args: Any) -> Any:
        threads.append(repr(work))
        return await to_thread(work, *args)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    async with live(site) as port:
        sent = json.dumps(given).encode()

        async def send() -> None:
            assert await send_from_outside(port, path, sent, 1) == [b"200"]

        await send()
        threads.clear()
        await assert_loop_stays_free(monkeypatch, send, P99, record_property)
    assert not any("_items" in work or "dumps" in work for work in threads), threads


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
