"""Models of a provider through every wire: requests that reach it, answers, failures, fallbacks and the ledger."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock.config.tenants.keys import new_key
from penstock.frontend.providers.circuit import FAILURES, OPEN_SECONDS, Circuit
from tests.frontend.conftest import NAME, live, parse_events
from tests.frontend.providers.conftest import KEY, FakeProvider, Make, Reply
from tests.frontend.providers.streams import OPENAI_TEXT, SAID, STREAMS, ended, sse, text_block
from tests.patience import PATIENCE, until

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("now", "then")]
TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("now", "then")]
KINDS = pytest.mark.parametrize("kind", ["openai", "anthropic"])
HALF = sse(*OPENAI_TEXT[:3])
QUICK = {"retries": 0}


async def answer(gateway: Any, **fields: Any) -> dict[str, Any]:
    response = await gateway.ask(**fields)
    assert response.status_code == 200, response.text
    return response.json()


async def error(gateway: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    response = await gateway.ask(**fields)
    return response.status_code, response.json()["error"]


@KINDS
async def test_openais_chat(gateway: Make, provider: FakeProvider, kind: str) -> None:
    site = await gateway(kind)
    provider.replies = [Reply(STREAMS[kind][0])]
    made = await answer(site, temperature=0.5, max_tokens=40, stop=["x"])
    assert made["choices"][0]["message"]["content"] == SAID and made["model"] == "remote"
    assert made["usage"]["prompt_tokens"] == 1000 and made["usage"]["completion_tokens"] == 50
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 600}
    sent, headers = provider.requests[0], provider.headers[0]
    assert (sent["model"], sent["stream"], sent["temperature"], sent["max_tokens"]) == ("upstream", True, 0.5, 40)
    if kind == "openai":
        assert headers["authorization"] == f"Bearer {KEY}" and headers["path"] == "/v1/chat/completions"
        assert sent["messages"] == [{"role": "user", "content": "hello"}] and sent["stop"] == ["x"]
    else:
        assert headers["x-api-key"] == KEY and headers["path"] == "/v1/messages"
        assert sent["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    provider.replies = [Reply(STREAMS[kind][1])]
    response = await site.ask(tools=FUNCTIONS, stream=True, stream_options={"include_usage": True})
    events = parse_events(response.content)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(each.get("reasoning_content") or "" for each in deltas) == "Hm, rain."
    assert "".join(each.get("content") or "" for each in deltas) == "I look."
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["now", "then"]
    arguments = {0: "", 1: ""}
    for call in calls:
        arguments[call["index"]] += call["function"]["arguments"]
    assert [json.loads(text) for text in arguments.values()] == [{"a": "Köln"}, {}]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["usage"]["total_tokens"] == 1050
    named = provider.requests[1]["tools"][0]
    assert (named["function"]["name"] if kind == "openai" else named["name"]) == "now"


@KINDS
async def test_the_other_wires(gateway: Make, provider: FakeProvider, kind: str) -> None:
    site = await gateway(kind)
    provider.replies = [Reply(STREAMS[kind][1])]
    thinking = {"type": "enabled", "budget_tokens": 50}
    message = await answer(site, path="/v1/messages", max_tokens=99, tools=TOOLS, thinking=thinking)
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and message["stop_reason"] == "tool_use"
    assert message["content"][2]["input"] == {"a": "Köln"}
    assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]) == (400, 600)
    response = await site.ask(path="/v1/messages", max_tokens=99, tools=TOOLS, stream=True)
    assert b'"partial_json":"{\\"a\\": \\"K' in response.content and b"message_stop" in response.content
    chat = await answer(site, path="/api/chat", stream=False, tools=FUNCTIONS)
    assert chat["message"]["tool_calls"][0]["function"]["arguments"] == {"a": "Köln"}
    assert (chat["prompt_eval_count"], chat["eval_count"]) == (1000, 50)
    provider.replies = [Reply(STREAMS[kind][0])]
    body: dict[str, Any] = {"model": "other-name", "prompt": "hello", "stream": False}
    assert (await site.http.post("/api/generate", json=body)).json()["response"] == SAID
    assert (await site.http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == SAID
    body = {"model": "remote", "input": "hello", "store": False}
    made = (await site.http.post("/v1/responses", json=body)).json()
    assert made["output"][0]["content"][0]["text"] == SAID and made["usage"]["output_tokens"] == 50
    names = [each["id"] for each in (await site.http.get("/v1/models")).json()["data"]]
    assert names == [NAME, "remote", "other-name"]
    assert {"remote", "other-name"} <= {
        each["id"] for each in (await site.http.get("/v1/models", headers={"anthropic-version": "1"})).json()["data"]
    }


@KINDS
async def test_what_a_chat_has_reaches_the_provider(gateway: Make, provider: FakeProvider, kind: str) -> None:
    site = await gateway(kind)
    provider.replies = [Reply(STREAMS[kind][0])]
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": "b"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "", "reasoning_content": "secret", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {"role": "user", "content": "and?"},
    ]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choice = {"type": "function", "function": {"name": "now"}}
    more = {"tools": FUNCTIONS, "tool_choice": choice, "parallel_tool_calls": False, "reasoning_effort": "low"}
    await answer(site, messages=messages, response_format=schema, **more)
    sent = provider.requests[0]
    if kind == "openai":
        assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "tool", "user"]
        assert sent["messages"][2] == {"role": "assistant", "content": None, "tool_calls": [call]}
        assert sent["tool_choice"] == choice and sent["parallel_tool_calls"] is False
        assert sent["response_format"]["json_schema"]["schema"] == SCHEMA and sent["reasoning_effort"] == "low"
        return
    assert sent["system"] == "Be brief." and sent["max_tokens"] == 4096
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "12:00"}
    assert sent["messages"][1:] == [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "now", "input": {"a": "b"}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    assert sent["tool_choice"] == {"type": "tool", "name": "now", "disable_parallel_tool_use": True}
    assert sent["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"min_p": 0.1}, "min_p"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"max_tokens": 10**7}, "max_tokens"),
        ({"path": "/v1/completions", "prompt": [1, 2], "messages": None}, "prompt"),
        ({"path": "/tokenize"}, "messages"),
    ],
)
async def test_parameters_that_a_provider_lacks(gateway: Make, fields: dict[str, Any], param: str) -> None:
    site = await gateway()
    if fields.get("messages", "") is None:
        fields = {**fields}
        response = await site.http.post(fields["path"], json={"model": "remote", "prompt": fields["prompt"]})
        status, said = response.status_code, response.json()["error"]
    else:
        status, said = await error(site, **fields)
    assert status == 400 and said["param"] == param, said


FAILURES_BY_REPLY = [
    (Reply(b'{"error": {"message": "no such\\nthing"}}', status=400), 400, "provider_refused", "no such thing"),
    (Reply(b'{"error": {"message": "bad key sk-1"}}', status=401), 502, "provider_key_refused", "tell its operator"),
    (Reply(b"oops", status=500), 502, "provider_failed", "HTTP 500"),
    (Reply(status=302, location="http://127.0.0.1:1/"), 502, "provider_failed", "HTTP 302"),
    (Reply(b"{}", status=429, retry_after="30"), 429, "provider_busy", "too many requests"),
    (Reply(b"data: {\n\n"), 502, "provider_stream_broken", "cannot be read"),
    (Reply(b"data: " + b"x" * (2 << 20) + b"\n\n"), 502, "provider_stream_broken", "more than"),
    (Reply(cut=True), 502, "provider_", "again"),
    (Reply(HALF), 502, "provider_stream_broken", "before the answer was complete"),
    (Reply(silent=True), 504, "provider_timeout", "in time"),
]


@pytest.mark.parametrize(("reply", "status", "code", "message"), FAILURES_BY_REPLY)
async def test_a_failing_provider(
    gateway: Make, provider: FakeProvider, reply: Reply, status: int, code: str, message: str
) -> None:
    site = await gateway(**QUICK, first_token_timeout=0.3 if reply.silent else PATIENCE)
    provider.replies = [reply]
    response = await site.ask()
    said = response.json()["error"]
    assert response.status_code == status and said["code"].startswith(code) and message in said["message"], said
    assert KEY not in response.text and "sk-1" not in response.text
    if status == 429:
        assert int(response.headers["retry-after"]) >= 30
        assert (await error(site))[1]["code"] == "provider_down" and len(provider.requests) == 1


async def test_a_requests_own_timeout(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway(fallbacks={"remote": [NAME]})
    provider.replies = [Reply(silent=True)]
    status, said = await error(site, timeout=0.3)
    assert (status, said["code"]) == (504, "deadline_exceeded") and len(provider.requests) <= 1
    assert site.value("penstock_provider_up", provider="there") == 1


async def test_tries_again_as_the_provider_says(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway(retry_seconds=PATIENCE)
    good = Reply(STREAMS["openai"][0])
    provider.replies = [Reply(status=503), Reply(b"{}", status=429, retry_after="0"), good]
    assert (await answer(site))["choices"][0]["message"]["content"] == SAID
    assert len(provider.requests) == 3
    assert site.value("penstock_provider_requests_total", provider="there", result="retried") == 2
    provider.replies = [Reply(status=503, retry_after="1000"), good]
    assert (await error(site))[0] == 502  # later than retry_seconds
    assert len(provider.requests) == 4


async def test_a_stream_that_breaks_says_so(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway()
    provider.replies = [Reply(HALF, cut=True)]
    response = await site.ask(stream=True)
    assert response.status_code == 200 and "Köln ".encode() in response.content
    assert b'"code":"provider_' in response.content and len(provider.requests) == 1
    response = await site.ask(path="/v1/messages", max_tokens=9, stream=True)
    assert b"event: error" in response.content


async def test_a_stream_that_breaks_goes_on_where_a_prefix_is_accepted(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway(accepts=["prefix"])
    rest = sse(*OPENAI_TEXT[3:])
    provider.replies = [Reply(HALF, cut=True), Reply(rest)]
    response = await site.ask(stream=True, max_tokens=100, stream_options={"include_usage": True})
    events = parse_events(response.content)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
    assert text == SAID
    again = provider.requests[1]
    assert again["messages"][-1] == {"role": "assistant", "content": "Köln 🌧"}
    assert again["continue_final_message"] is True and 90 < again["max_tokens"] < 100
    assert events[-1]["usage"]["completion_tokens"] > 50


async def test_a_client_that_leaves_ends_the_request(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway()
    provider.replies = [Reply(HALF, silent=True)]
    asking = asyncio.create_task(site.ask())
    await until(lambda: provider.requests)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: provider.left == 1)


async def test_falls_back_in_order(gateway: Make, provider: FakeProvider) -> None:
    others = {"remote": [NAME], NAME: ["remote"]}
    site = await gateway(fallbacks=others, **QUICK)
    provider.replies = [Reply(status=500)]
    made = await answer(site)
    assert made["model"] == NAME and made["choices"][0]["message"]["content"] == "hello"
    events = parse_events((await site.ask(stream=True)).content)
    assert events[0]["model"] == NAME
    assert site.value("penstock_fallbacks_total", model_name="remote", next=NAME) == 2
    assert (await answer(site, model="other-name"))["model"] == NAME
    provider.replies = [Reply(b'{"error": {"message": "no"}}', status=400)]
    assert (await error(site))[0] == 400  # the client's mistake is one everywhere
    provider.replies = [Reply(STREAMS["openai"][0])]
    site.engine.dies_after = 0
    assert (await answer(site, model=NAME))["model"] == "remote"
    site.engine.dies_after, site.engine.status = None, "asleep"
    assert (await answer(site, model=NAME))["model"] == "remote"
    await until(lambda: site.engine.status == "ready")  # it was woken
    assert (await answer(site, model=NAME))["model"] == NAME


async def test_a_circuit_keeps_requests_from_a_provider_that_fails(
    gateway: Make, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.frontend.providers.circuit.OPEN_SECONDS", PATIENCE)
    site = await gateway(fallbacks={"remote": [NAME]}, **QUICK)
    provider.replies = [Reply(status=500)]
    for _ in range(FAILURES + 3):
        assert (await answer(site))["model"] == NAME
    assert len(provider.requests) == FAILURES
    assert site.value("penstock_provider_up", provider="there") == 0


def test_a_circuit_opens_and_tries_one_request() -> None:
    circuit = Circuit()
    for second in range(FAILURES):
        assert circuit.allows(second)
        circuit.begin()
        circuit.failed(second)
    opened = FAILURES - 1 + OPEN_SECONDS
    assert not circuit.allows(opened - 0.1) and circuit.allows(opened)
    circuit.begin()
    assert not circuit.allows(opened)  # one at a time
    circuit.failed(opened)
    assert not circuit.allows(opened + 2 * OPEN_SECONDS - 0.1)
    circuit.begin()
    circuit.succeeded()
    circuit.hold(100.0)
    assert not circuit.allows(99.0) and circuit.allows(100.0)


async def test_a_pure_gateway(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway(local=False)
    provider.replies = [Reply(STREAMS["openai"][0])]
    assert (await site.http.get("/health")).status_code == 200
    assert (await site.http.get("/v1/models")).json()["data"][0]["id"] == "remote"
    assert (await answer(site))["choices"][0]["message"]["content"] == SAID


async def test_too_many_at_once_are_refused(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway(concurrent=1)
    provider.replies = [Reply(HALF, silent=True)]
    asking = asyncio.create_task(site.ask())
    await until(lambda: provider.requests)
    status, said = await error(site)
    assert status == 429 and "the limit is 1 (concurrent)" in said["message"]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_quotas_and_the_ledger_count_tokens_and_money(
    gateway: Make, provider: FakeProvider, tmp_path: Path
) -> None:
    key, key_id, stored = new_key()
    entry = {"keys": [{"name": "default", "id": key_id, "hash": stored}], "limits": {"budget_per_month": 0.05}}
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(json.dumps({"tenants": {"search": entry}, "show_cost": True}))
    state = tmp_path / "state"
    site = await gateway(fallbacks={NAME: ["remote"]}, server={"tenants": str(tenants), "state_dir": str(state)})
    site.http.headers["authorization"] = f"Bearer {key}"
    provider.replies = [Reply(STREAMS["openai"][0])]
    made = await answer(site, max_tokens=100)
    cost = (400 * 2.0 + 600 * 0.5 + 50 * 10.0) / 1e6
    assert made["usage"]["cost"] == pytest.approx(cost)
    site.engine.dies_after = 0
    response = await site.ask(NAME, max_tokens=20)
    assert response.json()["model"] == "remote"
    assert len(response.headers.get_list("x-ratelimit-limit-requests")) <= 1
    assert site.value("penstock_provider_cost_total", provider="there", model_name="remote") == pytest.approx(2 * cost)
    refused = await site.ask(max_tokens=60_000)  # 0.6 of the currency
    assert refused.status_code == 429 and len(provider.requests) == 2
    assert site.app.office is not None
    await site.app.office.close()
    rows = sqlite3.connect(state / "ledger.sqlite3").execute(
        "SELECT model, version, prompt, cached, output, reasoning, nano, currency FROM requests ORDER BY began"
    )
    *paid, last = list(rows)
    assert paid == [("remote", "there/upstream", 1000, 600, 50, 20, round(cost * 1e9), "USD")] * 2
    assert last[2:7] == (0, 0, 0, 0, 0)  # the refused one


async def test_a_bound_tenant_reaches_only_providers_of_its_regions(
    gateway: Make, provider: FakeProvider, tmp_path: Path
) -> None:
    key, key_id, stored = new_key()
    tenants = tmp_path / "tenants.yaml"
    entry = {"keys": [{"name": "default", "id": key_id, "hash": stored}], "regions": ["eu"]}
    tenants.write_text(json.dumps({"tenants": {"search": entry}}))
    provider.replies = [Reply(STREAMS["openai"][0])]
    server = {"tenants": str(tenants), "region": "eu"}
    for region, status in (("", 403), ("us", 403), ("eu", 200)):
        site = await gateway(fallbacks={NAME: ["remote"]}, server=server, region=region)
        site.http.headers["authorization"] = f"Bearer {key}"
        response = await site.ask()
        assert response.status_code == status, response.text
        assert (await site.ask(NAME)).status_code == 200
        site.engine.dies_after = 0
        assert (await site.ask(NAME)).status_code == status, "a fallback is no way out of the region"
    assert len(provider.requests) == 2


async def test_public_clients(gateway: Make, provider: FakeProvider) -> None:
    """The companies' own Python packages read what this server makes of a provider's stream."""
    site = await gateway("anthropic")
    provider.replies = [Reply(sse({"type": "message_start", "message": {}}, *text_block(0, SAID), *ended("end_turn")))]
    messages: Any = [{"role": "user", "content": "hello"}]
    async with live(site) as port:
        ours = openai.AsyncOpenAI(api_key="x", base_url=f"http://127.0.0.1:{port}/v1")
        async with ours, await ours.chat.completions.create(model="remote", messages=messages, stream=True) as stream:
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == SAID
        theirs = anthropic.AsyncAnthropic(api_key="x", base_url=f"http://127.0.0.1:{port}")
        async with theirs, theirs.messages.stream(model="remote", messages=messages, max_tokens=9) as events:
            assert await events.get_final_text() == SAID
