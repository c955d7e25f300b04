"""OpenAI's Responses API over a scripted engine: items, events, what is stored and for whom, and the limits."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError
from websockets.frames import CloseCode

from penstock.frontend import RequestLimits
from tests.frontend.conftest import Site, live
from tests.patience import PATIENCE, until

PATH = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
Sites = Callable[..., Site]


def read_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each valid for the client's types."""
    events = []
    for number, block in enumerate(body.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        EVENTS.validate_python(event, strict=True)
        events.append(event)
    return events


async def streamed(site: Site, **fields: Any) -> list[dict[str, Any]]:
    answer = await site.http.post(PATH, json={"stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return read_events(answer.content)


async def refused(site: Site, status: int, **fields: Any) -> dict[str, Any]:
    answer = await site.http.post(PATH, json=fields)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("cuts", [(1,), (3, 1), (100,)])
async def test_a_stream_has_every_item_from_its_addition_to_its_end(sites: Sites, cuts: tuple[int, ...]) -> None:
    site = sites()
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    site.says(f"<think>\nhm\n</think>\n\nYes é.\n{call}", cuts=cuts)
    events = await streamed(site, input="hello", tools=[TOOL], max_output_tokens=200)
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    begin = ["created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"]
    assert kinds[: len(begin)] == begin and kinds[-1] == "completed"
    response = events[-1]["response"]
    reasoning, message, called = response["output"]
    assert reasoning["content"][0]["text"].strip() == "hm" and message["content"][0]["text"].strip() == "Yes é."
    assert json.loads(called["arguments"]) == {"a": 1} and called["name"] == "add"
    for index, item in enumerate(response["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added" and own[-1]["type"] == "response.output_item.done"
        assert own[-1]["item"] == item and own[0]["item"]["id"] == item["id"]
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    whole = (await site.http.post(PATH, json={"input": "hello", "tools": [TOOL], "max_output_tokens": 200})).json()
    Response.model_validate(whole)

    def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if "id" not in key} for item in output]

    assert without_ids(whole["output"]) == without_ids(response["output"])
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert "store" in whole and whole["store"] is False  # this server stores nothing


async def test_an_answer_that_is_cut_says_so(site: Site) -> None:
    site.says("hello world", ends=False)
    (*_, last) = await streamed(site, input="hello", max_output_tokens=3)
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


async def test_a_stream_that_fails_ends_with_a_failed_response(site: Site) -> None:
    site.engine.row_error_after = 2
    (*_, last) = await streamed(site, input="hello")
    assert last["type"] == "response.failed" and "NaN" in last["response"]["error"]["message"]


async def test_a_response_continues_another(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path), max_model_len=256)
    site.says("hello")
    first = await site.post(PATH, input="this is", instructions="test")
    second = await site.post(PATH, input="a test", previous_response_id=first["id"])
    (prompt, continued) = [site.tokenizer.decode(request.prompt_ids) for request in site.engine.requests]
    assert "test" in prompt and "this is" in prompt
    assert "test\n" not in continued.split("this is")[0]  # instructions are of one response
    assert continued.index("this is") < continued.index("hello") < continued.index("a test")
    assert (await site.http.get(f"{PATH}/{second['id']}")).json() == second
    items = (await site.http.get(f"{PATH}/{second['id']}/input_items")).json()
    ResponseItemList.model_validate(items)
    assert [item["content"][0]["text"] for item in items["data"]] == ["a test"]
    for fields in ({"store": False}, {"max_output_tokens": 1, "stream": True, "store": False}):
        answer = await site.http.post(PATH, json={"input": "x", **fields})
        found = answer.json() if "stream" not in fields else read_events(answer.content)[-1]["response"]
        assert (await site.http.get(f"{PATH}/{found['id']}")).status_code == 404
    assert (await site.http.delete(f"{PATH}/{first['id']}")).json()["deleted"] is True
    error = await refused(site, 400, input="x", previous_response_id=second["id"])
    assert error["code"] == "previous_response_not_found" and first["id"] in error["message"]


async def test_another_key_finds_nothing(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path), api_key="one")
    site.http.headers["authorization"] = "Bearer one"
    made = await site.post(PATH, input="hello")
    other = make_site(state_dir=str(tmp_path), api_key="two")
    other.http.headers["authorization"] = "Bearer two"
    assert (await other.http.get(f"{PATH}/{made['id']}")).status_code == 503  # the first server uses the folder


async def test_a_chain_is_bounded_before_it_is_read(make_site: Sites, tmp_path: Path) -> None:
    limits = RequestLimits(max_response_chain=3)
    site = make_site(state_dir=str(tmp_path), limits=limits, max_model_len=512)
    previous = None
    for _ in range(3):
        more = {"previous_response_id": previous} if previous else {}
        previous = (await site.post(PATH, input="hello", max_output_tokens=1, **more))["id"]
    error = await refused(site, 400, input="hello", previous_response_id=previous)
    assert error["code"] == "chain_too_long" and "3 responses" in error["message"]


async def test_the_oldest_responses_make_room(
    make_site: Sites, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = 4 << 20
    limits = RequestLimits(max_stored_bytes=limit)
    site = make_site(state_dir=str(tmp_path), limits=limits, max_model_len=8192)
    site.says("hello")
    big, ids = {"key": "x" * 200_000}, []  # what is stored without being a prompt
    tool = {**TOOL, "parameters": {"type": "object", "description": big["key"]}}
    for _ in range(60):
        made = await site.post(PATH, input="x", max_output_tokens=4, tools=[tool], tool_choice="none")
        ids.append(made["id"])
        assert (await site.http.get(f"{PATH}/{made['id']}")).status_code == 200
        assert (tmp_path / "penstock.sqlite3").stat().st_size <= limit + (1 << 20)
    found = [(await site.http.get(f"{PATH}/{name}")).status_code for name in ids]
    gone = found.count(404)
    assert 30 < gone < 60 and found == [404] * gone + [200] * (60 - gone)
    error = await refused(site, 400, input="x", previous_response_id=ids[0])
    assert error["code"] == "previous_response_not_found" and "send the conversation in input" in error["message"]
    (line,) = [record.getMessage() for record in caplog.records if "oldest responses" in record.getMessage()]
    assert f"at most {limit} bytes" in line


async def test_files_make_room_by_responses_and_are_kept_themselves(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path), limits=RequestLimits(max_stored_bytes=2 << 20), max_model_len=8192)
    site.says("hello")
    made = await site.post(PATH, input="x", max_output_tokens=4)

    async def upload() -> Any:
        return await site.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x" * 500_000)})

    kept = []
    while (answer := await upload()).status_code == 200:
        kept.append(answer.json()["id"])
    error = answer.json()["error"]
    assert answer.status_code == 507 and error["code"] == "storage_full"
    assert f"it has its limit of {2 << 20} bytes" in error["message"] and "disk" not in error["message"]
    assert (await site.http.get(f"{PATH}/{made['id']}")).status_code == 404
    assert len(kept) >= 2
    for name in kept:
        assert (await site.http.get(f"/v1/files/{name}")).status_code == 200
    answered = await site.post(PATH, input="x" * 6000, max_output_tokens=4)  # it is answered, but may not be stored
    assert (await site.http.get(f"{PATH}/{answered['id']}")).status_code == (200 if answered["store"] else 404)


async def test_a_response_that_could_not_be_stored_says_so(make_site: Sites, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file, where the folder should be")
    site = make_site(state_dir=str(tmp_path / "state"))
    site.says("hello")
    made = await site.post(PATH, input="x", max_output_tokens=4)
    assert made["store"] is False and made["status"] == "incomplete" and made["output"]
    events = await streamed(site, input="x", max_output_tokens=4)  # with numbers that follow each other
    assert [event["response"]["store"] for event in events if "response" in event] == [True, True, False]
    async with live(site) as port, connect(f"ws://127.0.0.1:{port}{PATH}") as socket:
        await socket.send(json.dumps({"type": "response.create", "input": "x", "max_output_tokens": 4}))
        while not (event := json.loads(await socket.recv()))["type"].startswith("response.incomplete"):
            pass
        assert event["response"]["store"] is False
    scraped = (await site.http.get("/metrics")).text
    assert 'penstock_storage_errors_total{reason="unavailable"} 3.0' in scraped


SIZE = 20_000_000  # bytes: more than the kernel buffers for a connection


async def test_large_responses_that_are_read_at_once_are_in_the_budget_of_bodies(
    make_site: Sites, tmp_path: Path
) -> None:
    """Clients that ask for a large response and do not read it would hold as many copies of it in memory."""
    limits = RequestLimits(max_body_bytes=SIZE + 1000, max_buffered_bytes=4 * SIZE)
    site = make_site(state_dir=str(tmp_path), limits=limits, max_model_len=8192)
    site.says("hello")
    made = (await site.post(PATH, input="x", user="x" * SIZE, max_output_tokens=4))["id"]
    async with live(site) as port:
        sockets = []
        for _ in range(12):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(f"GET {PATH}/{made} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            sockets.append((reader, writer))
        heads = [await reader.readline() for reader, _ in sockets]
        taken, refused = (sum(status in head for head in heads) for status in (b" 200 ", b" 429 "))
        assert taken == 3 and refused == 9  # a fourth with its other fields would pass the budget
        assert site.app.bodies.used <= 4 * SIZE
        for _, writer in sockets:
            writer.transport.abort()
        await until(lambda: site.app.bodies.used == 0)
        answer = await site.http.get(f"{PATH}/{made}")
        assert answer.status_code == 200 and len(answer.content) > SIZE


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"background": True}, "background"),
        ({"truncation": "always"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_cannot_be_held_is_named(site: Site, fields: dict[str, Any], param: str) -> None:
    assert (await refused(site, 400, **{"input": "hello", **fields}))["param"] == param


async def test_items_become_messages(sites: Sites) -> None:
    site = sites()
    site.says("ok")
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    items = [
        {"type": "message", "role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "add 1"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {**call, "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    made = await site.http.post(PATH, json={"input": items, "tools": [TOOL]})
    assert made.status_code == 200, made.text
    prompt = site.tokenizer.decode(site.engine.requests[-1].prompt_ids)
    places = [prompt.index(text) for text in ("be brief", "add 1", "<tool_call>", "tool\n2")]
    assert places == sorted(places)


async def test_a_socket_creates_one_response_after_the_other(make_site: Sites, tmp_path: Path) -> None:
    site = make_site(state_dir=str(tmp_path))
    site.says("hello")
    async with live(site) as port, connect(f"ws://127.0.0.1:{port}{PATH}") as opened:
        for _ in range(2):
            await opened.send(json.dumps({"type": "response.create", "input": "hello"}))
        ids = []
        while len(ids) < 2:
            event = json.loads(await opened.recv())
            EVENTS.validate_python(event, strict=True)
            if event["type"] == "response.completed":
                ids.append(event["response"]["id"])
        more = {"input": "hello", "previous_response_id": ids[0]}
        await opened.send(json.dumps({"type": "response.create", **more}))
        assert json.loads(await opened.recv())["response"]["previous_response_id"] == ids[0]
        await opened.send("{")
        while (event := json.loads(await opened.recv()))["type"] != "error":
            pass
        assert event["error"]["code"] == "invalid_json"


async def test_messages_that_wait_on_a_socket_are_in_the_budget_of_bodies(make_site: Sites, tmp_path: Path) -> None:
    """One response at a time is made, so the others' messages would be held without a bound."""
    limits = RequestLimits(max_body_bytes=150_000, max_buffered_bytes=250_000)
    site = make_site(state_dir=str(tmp_path), limits=limits, max_model_len=8192)
    site.says("hello")
    async with live(site) as port:
        async with connect(f"ws://127.0.0.1:{port}{PATH}") as opened:
            site.engine.gate = asyncio.Event()
            await opened.send(json.dumps({"type": "response.create", "input": "hello"}))
            await until(lambda: site.engine.running == 1)
            padded = json.dumps({"type": "response.create", "input": "hello " * 16_000})
            with contextlib.suppress(ConnectionClosedError):
                for _ in range(8):
                    await opened.send(padded)
                    await asyncio.sleep(0.1)  # it is received, and waits for its turn
            async with asyncio.timeout(PATIENCE):
                await opened.wait_closed()
            assert opened.close_code == CloseCode.TRY_AGAIN_LATER
            assert "the limit is 250000 in total" in str(opened.close_reason)
        await until(lambda: site.app.bodies.used == 0)
