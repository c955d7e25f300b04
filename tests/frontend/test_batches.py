"""Files and batches over a scripted engine: forms, owners, each request answered once, a full storage."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai.types import Batch, FileObject
from openai.types.responses import Response

from penstock.frontend import RequestLimits, ServedModel
from penstock.frontend.batches.multipart import FormPart, read_boundary, read_form
from penstock.frontend.errors import APIError
from penstock.frontend.jobs.places import BatchPlaces
from penstock.frontend.local import LocalRequests
from penstock.frontend.storage import batches
from tests.frontend.conftest import NAME, Site, live
from tests.frontend.loop_time import assert_loop_stays_free
from tests.frontend.scripted import ScriptedClient
from tests.patience import PATIENCE, until

CHAT = "/v1/chat/completions"
Sites = Callable[..., Site]


def line(custom_id: str, url: str = CHAT, **body: Any) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    return json.dumps({"custom_id": custom_id, "url": url, "body": {"messages": messages, **body}}).encode() + b"\n"


async def upload(client: httpx.AsyncClient, content: bytes, name: str = "in.jsonl", **fields: str) -> httpx.Response:
    return await client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch", **fields})


async def begin(client: httpx.AsyncClient, content: bytes, endpoint: str = CHAT) -> dict[str, Any]:
    file = (await upload(client, content)).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    made = await client.post("/v1/batches", json=body)
    assert made.status_code == 200, made.text
    Batch.model_validate(made.json())
    return made.json()


async def ended(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        while True:
            batch = (await client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] not in ("validating", "in_progress", "cancelling"):
                Batch.model_validate(batch)
                return batch
            await asyncio.sleep(0.02)


async def answers(client: httpx.AsyncClient, file_id: str) -> dict[str, int]:
    """The status of each custom id."""
    text = (await client.get(f"/v1/files/{file_id}/content")).text
    found = [json.loads(row) for row in text.splitlines()]
    ids = [row["custom_id"] for row in found]
    assert len(ids) == len(set(ids))
    return {row["custom_id"]: row["response"]["status_code"] for row in found}


def client_of(port: int, key: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30)


async def test_a_file_of_empty_lines_does_not_hold_the_loop(
    make_site: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(state_dir=str(tmp_path))
    async with live(site) as port, client_of(port) as client:
        file = (await upload(client, b"\n" * 1_500_000 + line("a") + b" \n" * 200_000 + line("b"))).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}

        async def act() -> None:
            batch = await ended(client, (await client.post("/v1/batches", json=body)).json()["id"])
            assert await answers(client, batch["output_file_id"]) == {"a": 200, "b": 200}

        await assert_loop_stays_free(monkeypatch, act)


@pytest.mark.parametrize("size", [0, 1, 17, 300_000, 600_000])
async def test_a_file_comes_back_as_it_was(make_site: Sites, tmp_path: Path, size: int) -> None:
    site = make_site(state_dir=str(tmp_path))
    content = bytes(i * 7 % 251 for i in range(size))
    made = (await upload(site.http, content, "../../etc/passwd\u00e9")).json()
    FileObject.model_validate(made)
    assert made["bytes"] == size and made["filename"] == "../../etc/passwd\u00e9"
    got = await site.http.get(f"/v1/files/{made['id']}/content")
    assert got.content == content and got.headers["content-type"] == "application/octet-stream"
    assert (await site.http.get(f"/v1/files/{made['id']}")).json() == made
    assert [file["id"] for file in (await site.http.get("/v1/files?limit=1")).json()["data"]] == [made["id"]]
    assert (await site.http.delete(f"/v1/files/{made['id']}")).json()["deleted"]
    assert (await site.http.get(f"/v1/files/{made['id']}/content")).status_code == 404
    assert sorted(path.name for path in tmp_path.iterdir() if "sqlite" not in path.name) == ["lock"]


FORM = (
    b'--b--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b--x\r\ncontent-disposition: form-data; name="file"; filename="a\\"b.jsonl"\r\nContent-Type: x/y\r\n\r\n'
    b"\r\n--b--\r\n--b\r\r\n\r\n--b--x\r\n"
    b'Content-Disposition: form-data; name="empty"\r\n\r\n\r\n--b--x--\r\n'
)


async def parse(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    found: list[tuple[str, str | None, bytes]] = []
    async for event in read_form(chunks(), b"b--x"):
        if isinstance(event, FormPart):
            found.append((*event, b""))
        else:
            found[-1] = (*found[-1][:2], found[-1][2] + event)
    return found


async def test_a_file_that_is_deleted_while_it_is_sent_ends_the_connection(
    make_site: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(state_dir=str(tmp_path))
    async with live(site) as port, client_of(port) as client:
        file_id, size = (await upload(client, bytes(30 << 20))).json()["id"], 30 << 20
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /v1/files/{file_id}/content HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert f"content-length: {size}".encode() in await reader.readuntil(b"\r\n\r\n")
        assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
        assert 0 < len(await reader.read(-1)) < size  # the client sees that bytes are missing
        writer.close()
    messages = [record.getMessage() for record in caplog.records]
    assert any("its file was deleted meanwhile" in message for message in messages)
    assert not any(record.exc_info for record in caplog.records)


async def test_a_form_is_read_however_it_is_cut() -> None:
    whole = await parse([FORM])
    assert whole == [
        ("purpose", None, b"batch"),
        ("file", 'a"b.jsonl', b"\r\n--b--\r\n--b\r\r\n"),
        ("empty", None, b""),
    ]
    assert await parse([bytes([byte]) for byte in FORM]) == whole
    for cut in range(len(FORM)):
        assert await parse([FORM[:cut], FORM[cut:]]) == whole
        if cut < FORM.rindex(b"--b--x--") + 8:
            with pytest.raises(APIError):
                await parse([FORM[:cut]])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"x" * 100, "does not begin with its boundary"),
        (b"--b--x\r\n" + b"a" * 5000, "headers of a part"),
        (b"--b--x\r\nno: name\r\n\r\n", "Content-Disposition"),
        (b'--b--x\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n', "UTF-8"),
        (b'--b--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n' * 17, "more than 16 parts"),
        (b'--b--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n--b--x!!', "has no end"),
    ],
)
async def test_what_is_not_a_form_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(APIError, match=words):
        await parse([body])


def test_boundaries() -> None:
    assert read_boundary(b'multipart/form-data; charset=x; boundary="a b"') == b"a b"
    for wrong in (b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=" + b"a" * 71):
        with pytest.raises(APIError, match="boundary"):
            read_boundary(wrong)


@pytest.mark.parametrize(
    ("content", "name", "fields", "status"),
    [
        (b"x" * 1001, "a", {}, 413),
        (b"x", "a" * 256, {}, 400),
        (b"x", "a", {"purpose": "vision"}, 400),
        (b"x", "a", {"other": "x"}, 400),
        (b"x", "a", {"purpose": "b" * 300}, 400),
        (b"x", "a", {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"}, 400),
        (b"x", "a", {"expires_after[anchor]": "now", "expires_after[seconds]": "9999"}, 400),
        (b"x", "a", {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}, 200),
    ],
)
async def test_uploads_are_checked_and_leave_nothing_behind(
    make_site: Sites, tmp_path: Path, content: bytes, name: str, fields: dict[str, str], status: int
) -> None:
    site = make_site(state_dir=str(tmp_path), limits=RequestLimits(max_file_bytes=1000))
    answer = await upload(site.http, content, name, **fields)
    assert answer.status_code == status, answer.text
    assert len((await site.http.get("/v1/files")).json()["data"]) == (status == 200)


async def test_a_batch_answers_each_request_once(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path))
    site.says("hello")
    lines = [line(f"id-{i}", max_tokens=-1 if i == 3 else 4) for i in range(40)]
    async with live(site) as port, client_of(port) as client:
        made = await begin(client, b"\n".join(lines) + b"\n")
        batch = await ended(client, made["id"])
        assert batch["status"] == "completed" and batch["request_counts"] == {"total": 40, "completed": 39, "failed": 1}
        assert len(await answers(client, batch["output_file_id"])) == 39
        assert await answers(client, batch["error_file_id"]) == {"id-3": 400}
        assert (await client.post(f"/v1/batches/{made['id']}/cancel")).status_code == 409
        assert [found["id"] for found in (await client.get("/v1/batches")).json()["data"]] == [made["id"]]
    assert min(request.priority for request in site.engine.requests) > RequestLimits().max_priority


async def test_a_batch_of_responses(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path))
    site.says("hello")
    bodies = [{"input": "hello", "stream": True}, {"input": "hello", "previous_response_id": "resp_1"}, {}]
    rows = [{"custom_id": f"id-{i}", "url": "/v1/responses", "body": body} for i, body in enumerate(bodies)]
    async with live(site) as port, client_of(port) as client:
        content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        batch = await ended(client, (await begin(client, content, "/v1/responses"))["id"])
        output = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).json()
        shown = output["response"]["body"]
        answer = Response.model_validate(shown)
        assert (output["custom_id"], answer.output_text, answer.status) == ("id-0", "hello", "completed")
        assert shown["store"] is False and (await client.get(f"/v1/responses/{answer.id}")).status_code == 404
        assert await answers(client, batch["error_file_id"]) == {"id-1": 400, "id-2": 400}
        errors = (await client.get(f"/v1/files/{batch['error_file_id']}/content")).text
        assert "previous_response_id is not supported in a batch" in errors


async def test_a_batch_goes_on_where_a_server_ended(make_site: Sites, tmp_path: Path) -> None:
    total, seen = 60, []
    for attempt in range(4):
        site = make_site(state_dir=str(tmp_path))
        site.says("hello world, this is a test")
        async with live(site) as port, client_of(port) as client:
            if not attempt:
                made = await begin(client, b"".join(line(f"id-{i}") for i in range(total)))
            if attempt == 3:
                batch = await ended(client, made["id"])
                assert len(await answers(client, batch["output_file_id"])) == total
                break
            with contextlib.suppress(TimeoutError):  # an earlier server may have answered the rest
                async with asyncio.timeout(1):
                    while len(site.engine.requests) < 12:
                        await asyncio.sleep(0)
        seen.append(len(site.engine.requests))
    assert batch["request_counts"]["completed"] == total and seen[0] < total


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (line("a") + line("a"), "duplicate_custom_id"),
        (line("a", "/v1/completions"), "invalid_line"),
        (b"not JSON", "invalid_line"),
        (b'{"custom_id": "a", "url": "/v1/chat/completions", "body": {"x": ' + b"[" * 999, "invalid_line"),
        (line("a", user="x" * 3000), "line_too_long"),
        (b"".join(line(f"{i}") for i in range(11)), "too_many_requests"),
    ],
)
async def test_a_wrong_file_fails_its_batch(make_site: Sites, tmp_path: Path, content: bytes, code: str) -> None:
    limits = RequestLimits(max_batch_line_bytes=2000, max_batch_requests=10)
    site = make_site(state_dir=str(tmp_path), limits=limits)
    async with live(site) as port, client_of(port) as client:
        batch = await ended(client, (await begin(client, content))["id"])
        assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == code
    assert not site.engine.requests


async def test_a_batch_can_be_cancelled(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path))
    site.says("hello")
    site.engine.gate = asyncio.Event()
    async with live(site) as port, client_of(port) as client:
        first = await begin(client, b"".join(line(f"id-{i}") for i in range(50)))
        while site.engine.running < 16:
            await asyncio.sleep(0.01)
        second = await begin(client, line("x"))
        for made in (first, second):
            assert (await client.post(f"/v1/batches/{made['id']}/cancel")).json()["status"] == "cancelling"
        site.engine.gate.set()
        batch = await ended(client, first["id"])
        assert batch["status"] == "cancelled" and batch["request_counts"]["completed"] == 16
        assert len(await answers(client, batch["output_file_id"])) == 16
        assert (await ended(client, second["id"]))["status"] == "cancelled"


async def test_a_reload_changes_the_number_of_places(site: Site) -> None:
    local = LocalRequests(site.app.models, RequestLimits(), seed=None)
    places = BatchPlaces(local.capacity, local.others)
    taken = [asyncio.create_task(places.take()) for _ in range(20)]
    await until(lambda: sum(task.done() for task in taken) == 2 * site.engine.info.max_num_seqs == 16)
    larger = ScriptedClient(lambda request, choice: [1], vocab_size=site.engine.info.vocab_size, eos=0)
    larger.info = msgspec.structs.replace(larger.info, max_num_seqs=9)
    site.serving.exchange(ServedModel(name=NAME, client=larger, tokenizer=site.tokenizer, created=1))
    await until(lambda: sum(task.done() for task in taken) == 18)
    places.give_back(18)
    await asyncio.gather(*taken)


async def test_batches_take_turns(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path))
    site.engine.gate = asyncio.Event()
    async with live(site) as port, client_of(port) as client:
        long = await begin(client, b"".join(line(f"id-{i}", max_tokens=2) for i in range(300)))
        while site.engine.running < 16:
            await asyncio.sleep(0.01)
        short = [await begin(client, b"".join(line(f"{n}-{i}", max_tokens=n) for i in range(10))) for n in (3, 4)]
        for made in short:
            while (await client.get(f"/v1/batches/{made['id']}")).json()["status"] == "validating":
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # both wait for places
        site.engine.gate.set()
        for made in short:
            assert (await ended(client, made["id"]))["request_counts"]["completed"] == 10
        assert (await ended(client, long["id"]))["request_counts"]["completed"] == 300
    order = [request.sampling.max_tokens for request in site.engine.requests]
    assert order[:16] == [2] * 16 and len(order) == 320
    # Each batch asks the storage at its first turn whether it is cancelled, and misses turns until it has the reply.
    # Then three batches take turns. The engine may see neighbours in another order.
    for n in (3, 4):
        places = [place for place, tokens in enumerate(order) if tokens == n]
        assert len(places) == 10 and places[-1] - places[1] <= 3 * 8 + 2
        assert places[-1] < 160, "the long batch went on alone"


async def test_clients_go_before_batches(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path))
    site.says("hello")
    site.engine.gate = asyncio.Event()
    body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}
    async with live(site) as port, client_of(port) as client:
        asking = asyncio.create_task(client.post(CHAT, json=body))
        while not site.engine.running:
            await asyncio.sleep(0.01)
        made = await begin(client, b"".join(line(f"id-{i}") for i in range(50)))
        await until(lambda: site.engine.running == 1 + 16 // 4)  # max_num_seqs is 8: at most 16 when no client asks
        await asyncio.sleep(0.3)
        assert site.engine.running == 1 + 16 // 4
        site.engine.gate.set()
        assert (await asking).status_code == 200
        assert (await ended(client, made["id"]))["status"] == "completed"


async def test_a_full_storage_fails_the_batch_and_nothing_else(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path), limits=RequestLimits(max_stored_bytes=192 << 10))
    site.says("hello")
    async with live(site) as port, client_of(port) as client:
        made = await begin(client, b"".join(line(f"id-{i}") for i in range(400)))
        batch = await ended(client, made["id"])
        assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "storage_full"
        assert 0 < len(await answers(client, batch["output_file_id"])) < 400
        refused = await upload(client, b"x" * 100_000)
        assert refused.status_code == 507 and refused.json()["error"]["code"] == "storage_full"
        assert (await client.post(CHAT, json={"messages": [{"role": "user", "content": "hello"}]})).status_code == 200
        for file_id in (made["input_file_id"], batch["output_file_id"]):
            assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
        assert (await upload(client, b"x" * 30_000)).status_code == 200


async def test_another_key_finds_nothing(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path), api_key="one")
    site.says("hello")
    async with live(site) as port, client_of(port, "one") as client:
        made = await ended(client, (await begin(client, line("a")))["id"])
        response = (await client.post("/v1/responses", json={"input": "hello"})).json()
    site = make_site(state_dir=str(tmp_path), api_key="two")
    async with live(site) as port, client_of(port, "two") as client:
        for name in ("input_file_id", "output_file_id"):
            for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                answer = await client.request(method, f"/v1/files/{made[name]}{path}")
                assert answer.status_code == 404, path
        for method, path in (("GET", ""), ("POST", "/cancel")):
            assert (await client.request(method, f"/v1/batches/{made['id']}{path}")).status_code == 404
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            assert (await client.request(method, f"/v1/responses/{response['id']}{path}")).status_code == 404
        body = {"input": "x", "previous_response_id": response["id"]}
        assert (await client.post("/v1/responses", json=body)).status_code == 400
        wanted = {"input_file_id": made["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        assert (await client.post("/v1/batches", json=wanted)).status_code == 404
        for path in ("/v1/files", "/v1/batches", f"/v1/files?after={made['input_file_id']}"):
            assert (await client.get(path)).json().get("data", []) == []


@pytest.mark.parametrize("other", [None, "two"])
async def test_batches_of_a_key_that_is_not_used_wait(make_site: Sites, tmp_path: Path, other: str | None) -> None:
    site = make_site(state_dir=str(tmp_path), api_key="one")
    site.engine.gate = asyncio.Event()
    async with live(site) as port, client_of(port, "one") as client:
        made = await begin(client, b"".join(line(f"{i}", max_tokens=9) for i in range(30)))
        await until(lambda: site.engine.running > 0)
    site = make_site(state_dir=str(tmp_path), api_key=other)
    async with live(site) as port, client_of(port, other or "") as client:
        assert (await client.get(f"/v1/batches/{made['id']}")).status_code == 404
        assert (await client.post(CHAT, json=json.loads(line("a"))["body"])).status_code == 200
        assert len(site.engine.requests) == 1  # the batch's are older
        assert site.app.background is not None
        stored = site.app.background._storage  # type: ignore[attr-defined]

        def rows(connection: Any) -> list[int]:
            counts = ("batches", "files WHERE complete = 0")
            return [connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in counts]

        assert await stored.run(rows) == [1, 2]
        await stored.run(lambda connection: connection.execute("UPDATE batches SET expires = 1"))
        await stored.run(batches.expire)
        assert await stored.run(rows) == [0, 0]
