"""Reasoning, tools and errors of Anthropic's and Ollama's wires, however the tokens arrive."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageDeltaEvent
from pydantic import TypeAdapter

from penstock.config.facts import PoolingFacts
from penstock.declared.sampling import SAMPLING
from penstock.declared.settings import WIRE_NAMES
from penstock.frontend.wires import WIRES
from penstock.messages import NEUTRAL, EndsEngines, EngineError, QueueFull
from tests.frontend.conftest import NAME, Site, live

USER = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "now", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "now", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "Köln 🌧"}}\n</tool_call>'
TEXT = f"<think>\nHm, 🌧.\n</think>\n\nI look.\n{CALL}{CALL}"
THINKING = {"type": "enabled", "budget_tokens": 50}
EMBEDS = PoolingFacts(task="embed", mode="mean", width=8, encoder=True)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


async def message(site: Site, **fields: Any) -> dict[str, Any]:
    body = {"model": NAME, "messages": USER, "max_tokens": 500, **fields}
    response = await site.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(site: Site, **fields: Any) -> dict[str, Any]:
    """The message that the client's own code makes of a stream."""
    body = {"model": NAME, "messages": USER, "max_tokens": 500, "stream": True, **fields}
    response = await site.http.post("/v1/messages", json=body)
    snapshot, buffers = None, {}
    for event in response.text.split("\n\n")[:-1]:
        data = event.split("\n")[1].removeprefix("data: ")
        if data == '{"type":"ping"}':
            continue
        read = EVENT.validate_json(data, strict=True)
        snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()


def blocks(message: dict[str, Any]) -> list[Any]:
    return [
        (block["name"], block["input"]) if block["type"] == "tool_use" else (block["type"], block[block["type"]])
        for block in message["content"]
    ]


SAID = [("text", "I look."), ("now", {"a": "Köln 🌧"}), ("now", {"a": "Köln 🌧"})]


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
async def test_anthropics_blocks(sites: Callable[..., Site], cut: int) -> None:
    site = sites()
    site.says(TEXT, cuts=(cut,))
    for get in (message, streamed):
        shown = await get(site, tools=[TOOL], thinking=THINKING)
        assert blocks(shown) == [("thinking", "Hm, 🌧."), *SAID]
        assert shown["content"][0]["signature"] and shown["stop_reason"] == "tool_use"
        assert shown["usage"]["output_tokens_details"]["thinking_tokens"] > 5
        assert len({block["id"] for block in shown["content"][2:]}) == 2
        hidden = await get(site, tools=[TOOL])
        assert blocks(hidden) == SAID


async def test_the_answer_says_that_edits_of_the_context_are_not_applied(sites: Callable[..., Site]) -> None:
    site = sites()
    site.says("I look.")
    body = {"model": NAME, "messages": USER, "max_tokens": 50}
    edited = {**body, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    whole = BetaMessage.model_validate_json((await site.http.post("/v1/messages", json=edited)).content)
    events = (await site.http.post("/v1/messages", json={**edited, "stream": True})).text.split("\n\n")
    (data,) = (event.partition("data: ")[2] for event in events if event.startswith("event: message_delta"))
    for each in (whole, BetaRawMessageDeltaEvent.model_validate_json(data)):
        assert each.context_management is not None and each.context_management.applied_edits == []
    assert "context_management" not in await message(site)


async def test_thinking_reaches_template_and_engine(sites: Callable[..., Site]) -> None:
    site = sites()
    site.says("x")
    for fields, shown in (
        ({}, "</think>\n\nnone"),
        ({"thinking": {"type": "disabled"}}, "</think>\n\nnone"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": THINKING}, "assistant\n"),
    ):
        await message(site, **fields)
        prompt = site.tokenizer.decode(site.engine.requests[-1].prompt_ids, skip_special_tokens=False)
        assert prompt.endswith(shown), fields
    grammar = site.engine.requests[-1].grammar
    assert grammar is not None and grammar.thinking is not None


async def test_results_of_tools_reach_the_template(sites: Callable[..., Site]) -> None:
    """Anthropic's tool_result, and Ollama's message with the tool's name, are the same prompt."""
    site = sites()
    site.says("x")
    called = [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": "b"}}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "21 degrees"}
    history = [*USER, {"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
    await message(site, messages=history, tools=[TOOL], thinking=THINKING)
    call = {"function": {"name": "now", "arguments": {"a": "b"}}}
    messages = [*USER, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_name": "now", "content": "21 degrees"}]
    body = {"model": NAME, "messages": messages, "tools": [FUNCTION], "stream": False, "think": True}
    assert (await site.http.post("/api/chat", json=body)).status_code == 200
    first, second = (
        site.tokenizer.decode(request.prompt_ids, skip_special_tokens=False) for request in site.engine.requests[-2:]
    )
    assert first == second and "21 degrees" in first and '"a": "b"' in first


async def test_anthropics_errors(sites: Callable[..., Site]) -> None:
    site = sites()
    site.says("x")
    body = {"model": NAME, "messages": USER, "max_tokens": 5}

    async def error(**fields: Any) -> tuple[int, str]:
        response = await site.http.post("/v1/messages", json={**body, **fields})
        assert response.json()["type"] == "error" and response.headers["request-id"]
        return response.status_code, response.json()["error"]["type"]

    assert await error(max_tokens=0) == (400, "invalid_request_error")
    assert await error(tools=[{"type": "bash_20250124", "name": "bash"}]) == (400, "invalid_request_error")
    assert await error(mcp_servers=[{"url": "x"}]) == (400, "invalid_request_error")
    assert await error(model="x") == (404, "not_found_error")
    for refusal in (QueueFull("full", 3), EngineError("ended")):
        site.engine.refusal = refusal
        assert await error() == (529, "overloaded_error")
    site.engine.refusal = None
    site.engine.row_error_after = 1
    assert await error() == (500, "api_error")
    stream = await site.http.post("/v1/messages", json={**body, "stream": True})
    assert stream.text.split("\n\n")[-2].startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')
    site.engine.row_error_after = None


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_ollamas_messages(sites: Callable[..., Site], cut: int) -> None:
    site = sites()
    site.says(TEXT, cuts=(cut,))
    body = {"model": NAME, "messages": USER, "tools": [FUNCTION]}
    whole = (await site.http.post("/api/chat", json={**body, "stream": False})).json()["message"]
    expected = [{"index": i, "name": "now", "arguments": {"a": "Köln 🌧"}} for i in range(2)]
    assert (whole["thinking"], whole["content"]) == ("Hm, 🌧.", "I look.")
    assert [call["function"] for call in whole["tool_calls"]] == expected
    lines = (await site.http.post("/api/chat", json=body)).text.splitlines()
    messages = [json.loads(line)["message"] for line in lines]
    assert "".join(message.get("thinking", "") for message in messages) == "Hm, 🌧."
    assert "".join(message["content"] for message in messages) == "I look."
    assert [call["function"] for message in messages for call in message.get("tool_calls", ())] == expected
    quiet = (await site.http.post("/api/chat", json={**body, "stream": False, "think": False})).json()["message"]
    assert "thinking" not in quiet and quiet["content"] == "I look."


async def test_ollamas_stream_that_fails(sites: Callable[..., Site]) -> None:
    site = sites()
    site.says("hello")
    site.engine.row_error_after = 2
    lines = (await site.http.post("/api/chat", json={"model": NAME, "messages": USER})).text.splitlines()
    assert json.loads(lines[-1]) == {"error": "NaN in the logits"}
    site.engine.row_error_after = None


async def test_ollama_loads_an_embedding_model_by_an_empty_request(make_site: Callable[..., Site]) -> None:
    site = make_site(pooling=EMBEDS)
    for given in ({"input": ""}, {"input": []}, {}):
        assert (await site.post("/api/embed", **given))["embeddings"] == []
    for given in ({"prompt": ""}, {}):
        assert await site.post("/api/embeddings", **given) == {"embedding": []}
    assert not site.engine.requests


async def test_documents_are_cut_for_a_model_that_embeds_them(make_site: Callable[..., Site]) -> None:
    site = make_site(pooling=EMBEDS)
    body = {"query": "hello world", "documents": ["this is a test", "this", "this is a test"]}
    await site.post("/rerank", **body, max_tokens_per_doc=2)
    query, *documents = (len(request.prompt_ids) for request in site.engine.requests)
    assert query > 2 and documents and max(documents) == 2


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1] is empty"),
        ("/rerank", {"query": "a", "documents": ["a", "b" * 20_000]}, "documents[1] has 20000 characters"),
        ("/rerank", {"query": "a" * 20_000, "documents": ["b"]}, "query has 20000 characters"),
        ("/score", {"text_1": "a", "text_2": ["a", "b", ""]}, "text_2[2] is empty"),
    ],
)
async def test_errors_name_the_text_that_is_wrong(
    make_site: Callable[..., Site], path: str, body: dict[str, Any], named: str
) -> None:
    response = await make_site(pooling=EMBEDS).http.post(path, json=body)
    assert response.status_code == 400 and response.json()["message"].startswith(named)


async def test_wires_can_be_turned_off(make_site: Callable[..., Site]) -> None:
    assert tuple(dict.fromkeys(wire.name for wire in WIRES)) == WIRE_NAMES
    site = make_site(wires=("ollama",))
    assert (await site.http.get("/api/tags")).status_code == 200
    for path in ("/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/batches"):
        answer = await site.http.post(path, json={})
        assert answer.status_code == 404 and "GET /openapi.json lists all routes" in answer.text


ENDS_ENGINES = EndsEngines("the engine ended twice while it computed this prompt: do not send it again")
GENERATING = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "hello"},
    "/generate": {"inputs": "hello"},
    "/generate_stream": {"inputs": "hello"},
    f"/v2/models/{NAME}/generate": {"text_input": "hello", "max_tokens": 2},
    f"/v2/models/{NAME}/infer": {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]
    },
}


@pytest.mark.parametrize("path", GENERATING)
async def test_a_prompt_that_ends_engines_must_not_be_sent_again(site: Site, path: str) -> None:
    site.engine.refusal = ENDS_ENGINES
    model = {"model": NAME} if path.startswith(("/v1", "/api")) else {}
    async with live(site) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        answer = await http.post(path, json={**model, **GENERATING[path]})
    assert answer.status_code == (422 if path.startswith("/generate") else 400), answer.text
    assert "do not send it again" in answer.text
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", GENERATING)
async def test_every_wire_has_every_sampling_parameter(site: Site, path: str) -> None:
    values = {name: 3 if parameter.whole else 0.5 for name, parameter in SAMPLING.items()}
    fields: dict[str, Any] = dict(values)
    if path.startswith("/api"):
        fields["repeat_penalty"] = fields.pop("repetition_penalty")
        fields = {"options": fields}
    elif not path.startswith("/v1"):
        fields = {"parameters": fields}
    model = {"model": NAME} if path.startswith(("/v1", "/api")) else {}
    answer = await site.http.post(path, json={**model, **GENERATING[path], **fields})
    assert answer.status_code == 200, answer.text
    (request,) = site.engine.requests
    assert {name: getattr(request.sampling, name) for name in values} == values


async def test_values_that_other_servers_have_for_off_are_neutral(site: Site) -> None:
    off = {name: parameter.off for name, parameter in SAMPLING.items() if parameter.off is not None}
    assert set(off) >= {"top_k", "top_n_sigma"}
    await site.post("/v1/completions", prompt="hello", max_tokens=1, **off)
    sampling = site.engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in off} == {name: NEUTRAL[name] for name in off}


async def test_keys_are_taken_from_either_header(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret")
    for headers, status in (
        ({}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
    ):
        assert (await site.http.get("/v1/models", headers=headers)).status_code == status
    refused = await site.http.post("/v1/messages", json={})
    assert refused.json()["error"]["type"] == "authentication_error"


async def test_some_clients_name_no_type_but_pages_of_other_sites_are_refused(site: Site) -> None:
    for headers, status in (
        ({}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),
        ({"origin": "http://evil.test"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ):
        body = json.dumps({"model": NAME}).encode()
        for path in ("/api/show", f"/v2/repository/models/{NAME}/load"):
            assert (await site.http.post(path, content=body, headers=headers)).status_code == status
    assert (await site.http.post("/v1/messages", content=b"{}")).status_code == 415


async def test_ollama_shows_recommended_values_under_its_own_names(make_site: Callable[..., Site]) -> None:
    site = make_site(defaults={"temperature": 0.5, "repetition_penalty": 1.05})
    shown = (await site.http.post("/api/show", json={"model": NAME})).json()
    options = dict(line.split() for line in shown["parameters"].splitlines())
    assert options == {"temperature": "0.5", "repeat_penalty": "1.05"}
    body = {"model": NAME, "messages": USER, "stream": False}
    options = {name: float(value) for name, value in options.items()}
    assert (await site.http.post("/api/chat", json={**body, "options": options})).status_code == 200
