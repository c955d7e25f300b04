"""Chats over WebSockets, with a client that we did not write: many at a time, cancelled, refused, unread, drained."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as sync_connect

from penstock.frontend import RequestLimits, serve
from tests.frontend.conftest import Site, listening, live
from tests.frontend.loop_time import assert_loop_stays_free
from tests.patience import PATIENCE, until

USER = {"messages": [{"role": "user", "content": "hello"}]}
STREAM = {**USER, "stream": True}
PATH = "/v1/chat/ws"


@contextlib.asynccontextmanager
async def socket(site: Site, **options: Any) -> AsyncIterator[ClientConnection]:
    async with live(site) as port, connect(f"ws://127.0.0.1:{port}{PATH}", **options) as opened:
        yield opened


async def ask(opened: ClientConnection, id: str, **body: Any) -> None:
    await opened.send(json.dumps({"id": id, "body": body}))


async def events(opened: ClientConnection, *ids: str) -> dict[str, list[dict[str, Any]]]:
    """The events of requests until all of them have ended."""
    got: dict[str, list[dict[str, Any]]] = {id: [] for id in ids}
    while any(not events or events[-1]["type"] == "chunk" for events in got.values()):
        event = json.loads(await asyncio.wait_for(opened.recv(), 60))
        got[event.pop("id")].append(event)
    return got


def text(events: list[dict[str, Any]]) -> str:
    return "".join(event["chunk"]["choices"][0]["delta"].get("content", "") for event in events[:-1])


async def test_many_requests_at_a_time(site: Site) -> None:
    ids = site.says("hello world, this is a test", cuts=(1, 3))
    async with socket(site) as opened:
        site.engine.gate = asyncio.Event()
        for id in "abc":
            await ask(opened, id, **STREAM)
        await ask(opened, "whole", **USER)
        await until(lambda: site.engine.running == 4)
        site.engine.gate.set()
        got = await events(opened, "a", "b", "c", "whole")
    (whole,) = got.pop("whole")
    assert whole["type"] == "completion"
    answer = whole["completion"]["choices"][0]["message"]["content"]
    assert answer == site.tokenizer.decode(ids)
    for chunks in got.values():
        assert [event["type"] for event in chunks] == ["chunk"] * (len(chunks) - 1) + ["done"]
        assert text(chunks) == answer
        assert len({event["chunk"]["id"] for event in chunks[:-1]}) == 1


async def test_cancel_ends_one_request_in_the_engine(site: Site) -> None:
    site.says("hello world", ends=False)
    async with socket(site) as opened:
        site.engine.gate = asyncio.Event()
        await ask(opened, "a", **STREAM)
        await ask(opened, "b", **STREAM, max_tokens=5)
        await until(lambda: site.engine.running == 2)
        await opened.send(json.dumps({"id": "a", "cancel": True}))
        await opened.send(json.dumps({"id": "of no request", "cancel": True}))
        await until(lambda: site.engine.running == 1)
        site.engine.gate.set()
        got = await events(opened, "a", "b")
        assert site.engine.aborted == [site.engine.requests[0].request_id]
        await ask(opened, "a", **USER, max_tokens=2)  # the id is free again
        assert (await events(opened, "a"))["a"][0]["type"] == "completion"
    assert (got["a"][-1]["type"], got["b"][-1]["type"]) == ("cancelled", "done")


@pytest.mark.parametrize(
    ("message", "id", "status", "says"),
    [
        ("{", None, 400, "not valid JSON"),
        ("[]", None, 400, "is an array; it must be an object"),
        (b"\xff", None, 400, "not UTF-8"),
        ('{"id": "", "body": {}}', None, 400, "id has 0 characters"),
        ('{"id": "a"}', None, 400, "either a body"),
        ('{"id": "a", "body": {}, "cancel": true}', None, 400, "either a body"),
        ('{"id": "a", "body": {}, "x": 1}', None, 400, "unknown parameter 'x'"),
        ('{"id": "a", "body": {}}', "a", 400, "messages is missing"),
        ('{"id": "a", "body": {"messages": [], "messages": []}}', "a", 400, "twice"),
        ('{"id": "a", "body": ' + "[" * 100 + "]" * 100 + "}", "a", 400, "more than 64 deep"),
        ('{"id": "a", "body": ' + "[" * 9000 + "]" * 9000 + "}", None, 400, "more than 64 deep"),
        (json.dumps({"id": "a", "body": {**USER, "model": "gpt"}}), "a", 404, "'gpt' is not served"),
        (json.dumps({"id": "a", "body": {**USER, "stop": "x" * 999}}), "a", 400, "256"),
    ],
)
async def test_a_wrong_message_is_answered_and_the_socket_stays(
    site: Site, message: str, id: str | None, status: int, says: str
) -> None:
    async with socket(site) as opened:
        await opened.send(message)
        event = json.loads(await opened.recv())
        assert (event["id"], event["type"], event["status"]) == (id, "error", status)
        assert set(event["error"]) == {"message", "type", "param", "code"} and says in event["error"]["message"]
        await ask(opened, "b", **USER, max_tokens=2)
        assert (await events(opened, "b"))["b"][0]["type"] == "completion"


@pytest.mark.parametrize("path", [PATH, "/v1/responses"])
async def test_a_message_costs_no_more_than_its_bytes(site: Site, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = '{"type":"response.create"' + "".join(f',"{i:x}":1' for i in range(380_000)) + "}"
    lists = '{"type":"response.create","input":[' + "[]," * 1_390_000 + "[]]}"
    double = '{"type":"response.create","a":1,"a":2}'
    if path == PATH:
        keys, lists, double = (f'{{"id":"a","body":{message}}}' for message in (keys, lists, double))
    async with live(site) as port:
        # The client has a thread of its own: what it does to 4 MB does not count as the server's.
        opened = await asyncio.to_thread(sync_connect, f"ws://127.0.0.1:{port}{path}")

        def refusal(message: str) -> str:
            opened.send(message)
            return json.loads(opened.recv())["error"]["code"]

        async def send() -> None:
            for message in (keys, lists):
                assert await asyncio.to_thread(refusal, message) == "body_too_complex"

        await assert_loop_stays_free(monkeypatch, send)
        assert await asyncio.to_thread(refusal, double) == "duplicate_key"
        await asyncio.to_thread(opened.close)
    assert site.app.bodies.used == 0


async def test_requests_on_a_socket_are_limited_and_ids_are_unique(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(max_socket_requests=2))
    site.engine.gate = asyncio.Event()
    async with socket(site) as opened:
        for id in "aabc":
            await ask(opened, id, **STREAM, max_tokens=5)
        refused = [json.loads(await opened.recv()) for _ in range(4)]
        refused = [event for event in refused if event["type"] == "error"]
        assert [(event["id"], event["status"]) for event in refused] == [("a", 400), ("c", 429)]
        assert refused[1]["retry_after"] == 1 and "2 requests are in flight" in refused[1]["error"]["message"]
        site.engine.gate.set()
        assert {got[-1]["type"] for got in (await events(opened, "a", "b")).values()} == {"done"}


async def test_limits_of_the_server_hold(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(max_body_bytes=20_000, max_sockets=2, max_in_flight=1))
    site.engine.gate = asyncio.Event()
    async with live(site) as port:
        url = f"ws://127.0.0.1:{port}{PATH}"
        async with connect(url) as first, connect(url) as second:
            with pytest.raises(InvalidStatus) as refused:
                await connect(url)
            assert refused.value.response.status_code == 429
            assert json.loads(refused.value.response.body)["error"]["code"] == "too_many_sockets"
            await ask(first, "a", **STREAM)
            await until(lambda: site.engine.running == 1)
            await ask(first, "b", **STREAM)
            while (event := json.loads(await first.recv()))["id"] != "b":
                pass
            assert event["status"] == 429 and "--max-in-flight" in event["error"]["message"]
            await second.send("x" * 30_000)
            with pytest.raises(ConnectionClosed) as closed:
                await second.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
            await first.close()
            await until(lambda: site.engine.running == 0 and site.app.lifecycle.requests == 0)
        await until(lambda: site.app.sockets == 0 and site.app.bodies.used == 0)


async def test_messages_that_arrive_in_part_count_as_buffered(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(max_body_bytes=10_000, max_buffered_bytes=10_000))

    def parts() -> Any:
        yield "x" * 6000
        yield "y" * 6000

    async with live(site) as port, connect(f"ws://127.0.0.1:{port}{PATH}") as opened:
        with contextlib.suppress(ConnectionClosed):
            await opened.send(parts())
        with pytest.raises(ConnectionClosed) as closed:
            await opened.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        assert site.app.bodies.used == 0


async def test_a_reader_that_pauses_gets_everything(site: Site) -> None:
    site.says("hello world ", ends=False, cuts=(1,))
    site.engine.output = lambda request, choice: [*site.tokenizer.encode("hello world, ", add_special_tokens=False)]
    async with live(site) as port:
        url = f"ws://127.0.0.1:{port}{PATH}"
        async with connect(url, max_queue=1) as opened:
            ids = [f"{'i' * 100}{i}" for i in range(40)]
            for id in ids:
                await ask(opened, id, **STREAM, max_tokens=40, logprobs=True, top_logprobs=20)
            await asyncio.sleep(0.5)  # more than the buffers hold has been produced
            got = await events(opened, *ids)
    for chunks in got.values():
        assert chunks[-1]["type"] == "done" and text(chunks).startswith("hello world, hello")
        tokens = [t for e in chunks[:-1] for t in (e["chunk"]["choices"][0]["logprobs"] or {}).get("content", ())]
        assert len(tokens) == 40


async def test_a_client_that_never_reads_is_closed_and_its_requests_aborted(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(write_timeout=0.5, ping_interval=60), max_model_len=4000)
    site.says("hello world, ", ends=False)
    async with live(site) as port, connect(f"ws://127.0.0.1:{port}{PATH}", max_queue=1, close_timeout=0.1) as opened:
        for i in range(30):
            await ask(opened, f"{i}", **STREAM, max_tokens=3900, logprobs=True, top_logprobs=20)
        await until(lambda: bool(site.engine.running))
        await until(lambda: site.engine.running == 0 and site.app.sockets == 0)
        assert site.engine.aborted


async def test_a_client_that_does_not_answer_pings_is_closed(make_site: Callable[..., Site]) -> None:
    site = make_site(limits=RequestLimits(ping_interval=1.0))  # also the time for an answer
    async with live(site) as port, connect(f"ws://127.0.0.1:{port}{PATH}", close_timeout=0.1) as opened:
        await asyncio.sleep(2.5)  # this client answers
        assert site.app.sockets == 1
        opened.transport.pause_reading()
        await until(lambda: site.app.sockets == 0)


KEY = "secret-key.1"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"additional_headers": BEARER}, 101),
        ({"additional_headers": {"X-Api-Key": KEY}}, 101),
        ({"subprotocols": ["chat", f"openai-insecure-api-key.{KEY}"]}, 101),
        ({}, 401),
        ({"subprotocols": ["chat", "openai-insecure-api-key.wrong"]}, 401),
        ({"additional_headers": BEARER, "origin": "https://evil.example"}, 403),
        ({"additional_headers": BEARER, "origin": "https://app.example"}, 101),
    ],
)
async def test_a_key_and_an_origin_are_checked(
    make_site: Callable[..., Site], options: dict[str, Any], status: int
) -> None:
    site = make_site(api_key=KEY, cors_origin=("https://app.example",))
    async with live(site) as port:
        url = f"ws://127.0.0.1:{port}{PATH}"
        if status != 101:
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, **options)
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body)["error"]["type"] == "authentication_error"
            assert site.app.sockets == 0
            return
        async with connect(url, **options) as opened:
            assert opened.subprotocol == ("chat" if "subprotocols" in options else None)
            await ask(opened, "a", **USER, max_tokens=2)
            assert (await events(opened, "a"))["a"][0]["type"] == "completion"


async def test_hosts_paths_and_methods(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async with live(site) as port:
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}{PATH}", additional_headers={"Origin": "http://evil.example"})
        assert refused.value.response.status_code == 403
        with pytest.raises(InvalidStatus) as refused:  # a name that was rebound
            await connect(f"ws://evil.example:{port}{PATH}", host="127.0.0.1", port=port)
        assert json.loads(refused.value.response.body)["error"]["code"] == "host_refused"
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}/v1/models")
        assert refused.value.response.status_code == 200  # HTTP lets a server ignore an upgrade
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answer = await http.get(PATH)
            assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
            assert "/v1/chat/ws" in answer.json()["error"]["message"]
            metrics = (await http.get("/metrics")).text
    assert f'code="426",method="GET",route="{PATH}"' in metrics and f'code="403",method="GET",route="{PATH}"' in metrics


async def test_requests_on_a_socket_are_counted_as_others(site: Site) -> None:
    async with live(site) as port:
        async with connect(f"ws://127.0.0.1:{port}{PATH}") as opened:
            await ask(opened, "a", **USER, max_tokens=2)
            await ask(opened, "b", **USER, stop=5)
            await events(opened, "a", "b")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            metrics = (await http.get("/metrics")).text
    for code, method, path in ((200, "POST", "/v1/chat/completions"), (400, "POST", "/v1/chat/completions")):
        assert f'code="{code}",method="{method}",route="{path}"}} 1.0' in metrics
    assert f'code="101",method="GET",route="{PATH}"}} 1.0' in metrics


async def test_a_stopping_server_finishes_requests_and_closes_sockets(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    sock, stop = listening(), asyncio.Event()
    running = asyncio.create_task(serve(site.app, sock, stop=stop))
    port = sock.getsockname()[1]
    async with connect(f"ws://127.0.0.1:{port}{PATH}") as opened, connect(f"ws://127.0.0.1:{port}{PATH}") as idle:
        await ask(opened, "a", **STREAM, max_tokens=5)
        await until(lambda: site.engine.running == 1)
        stop.set()
        await until(lambda: site.app.lifecycle.draining)
        await ask(opened, "late", **STREAM)
        while (event := json.loads(await opened.recv()))["id"] != "late":
            pass
        assert event["status"] == 503 and event["error"]["code"] == "draining"
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}{PATH}")
        assert refused.value.response.status_code == 503
        site.engine.gate.set()
        assert (await events(opened, "a"))["a"][-1]["type"] == "done"
        for each in (opened, idle):
            with pytest.raises(ConnectionClosed) as closed:
                await each.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    await asyncio.wait_for(running, PATIENCE)


async def test_an_error_after_the_start_ends_a_stream_once(site: Site) -> None:
    site.engine.row_error_after = 2
    async with socket(site) as opened:
        await ask(opened, "a", **STREAM, max_tokens=9)
        got = (await events(opened, "a"))["a"]
        assert got[-1]["type"] == "error" and "NaN" in got[-1]["error"]["message"]
        await ask(opened, "b", **USER, stop=[1])
        assert json.loads(await opened.recv())["id"] == "b"  # nothing more came of the first


async def test_unread_whole_answers_have_one_budget(make_site: Callable[..., Site]) -> None:
    """The answers wait in the process while the client reads none of them."""
    most = 48 << 20
    site = make_site(max_model_len=2000, limits=RequestLimits(max_unread_bytes=most))
    site.engine.cuts = (50,)
    large = {**USER, "n": 8, "max_tokens": 1200, "logprobs": True, "top_logprobs": 20}  # more than sockets hold
    ids = [str(number) for number in range(4)]
    async with socket(site, max_size=None) as opened:
        opened.transport.pause_reading()
        for id in ids:
            await ask(opened, id, **large)
        peak = 0
        async with asyncio.timeout(120):
            while site.app.lifecycle.requests or len(site.engine.requests) < len(ids):
                peak = max(peak, site.app.unread.used)
                await asyncio.sleep(0.005)
        held = site.app.unread.used  # the app has answered, and the sockets do not hold all of it
        opened.transport.resume_reading()
        got = await events(opened, *ids)
        assert {event["type"] for (event,) in got.values()} == {"completion", "error"}
        assert all(event["status"] == 429 for (event,) in got.values() if event["type"] == "error")
        assert 0 < held <= most and 0 < peak <= most
        await until(lambda: site.app.unread.used == 0)
