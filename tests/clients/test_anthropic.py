"""Anthropic's wire with the unmodified `anthropic` client and SmolLM2. Answers are validated against its types."""

import json
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.e2e.server import Server

MODEL = "smollm2"
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # the client's newest version has no such parameter
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, read by the grammar of its wire, each valid for the client's types."""
    body = {"model": MODEL, "messages": USER, "max_tokens": 40, "temperature": 0, "stream": True, **fields}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200 and answer.text.endswith("\n\n"), answer.text
    found = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        if payload["type"] != "ping":
            EVENT.validate_json(data.removeprefix("data: "), strict=True)
        found.append(payload)
    return found


def test_a_message_and_its_stream_are_the_same(server: Server, client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 30, **GREEDY}
    raw = client.messages.with_raw_response.create(**fields, system="Be brief.")
    assert raw.headers["request-id"]
    Message.model_validate_json(raw.http_response.content, strict=True)
    whole = raw.parse()
    with client.messages.stream(**fields, system=[{"type": "text", "text": "Be brief."}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.to_dict()["content"] == whole.to_dict()["content"] and text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 30
    total = [usage.input_tokens + usage.cache_read_input_tokens for usage in (final.usage, whole.usage)]
    assert total[0] == total[1] and final.usage.cache_read_input_tokens >= 16  # the second one's prompt is cached
    count = client.messages.count_tokens(model=MODEL, messages=USER, system="Be brief.")
    assert MessageTokensCount.model_validate(count.model_dump(), strict=True).input_tokens == total[0]


def test_the_order_of_events(server: Server) -> None:
    found = [event["type"] for event in events(server)]
    assert found[:3] == ["message_start", "ping", "content_block_start"]
    assert found[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(found[3:-3]) == {"content_block_delta"}


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 60, **GREEDY}
    messages = [{"role": "user", "content": "Count: one two three four"}]
    text = client.messages.create(messages=messages, **fields).content[0].text
    stop = text[5:9]
    answer = client.messages.create(messages=messages, stop_sequences=["never said", stop], **fields)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


def test_a_prefilled_answer_goes_on(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "The colour is"}]
    answer = client.messages.create(model=MODEL, messages=messages, max_tokens=5, **GREEDY)
    assert answer.content[0].text.startswith(" ")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called_and_its_result_read(
    server: Server, client: anthropic.Anthropic, choice: dict[str, str]
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "max_tokens": 100, **GREEDY}
    whole = client.messages.create(messages=USER, tool_choice=choice, **fields)
    Message.model_validate_json(whole.model_dump_json(exclude_unset=True), strict=True)
    (call,) = whole.content
    assert whole.stop_reason == "tool_use" and call.name == "get_weather"
    jsonschema.validate(call.input, WEATHER["input_schema"])
    found = events(server, tools=[WEATHER], tool_choice=choice, max_tokens=100)
    start = next(event for event in found if event["type"] == "content_block_start")
    assert start["content_block"] == {
        "type": "tool_use",
        "id": start["content_block"]["id"],
        "name": "get_weather",
        "input": {},
    }
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    messages = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=messages, tool_choice={"type": "none"}, **fields)
    assert answer.content[0].type == "text"


def test_a_request_as_claude_code_sends_it(server: Server) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": MODEL,
        "max_tokens": 32000,  # more than the context has
        "system": [{"type": "text", "text": "You help with code."}, {"type": "text", "text": "Be brief.", **cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hi.", **cached}]}],
        "tools": [{**WEATHER, **cached}],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []},
        "stop_sequences": ["."],
        "temperature": 1,
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    answer = httpx.post(f"{server.url}/v1/messages?beta=true", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200 and "event: message_stop" in answer.text, answer.text


def test_an_answer_holds_to_a_schema(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = client.messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a colour."}],
        max_tokens=30,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    jsonschema.validate(json.loads(answer.content[0].text), schema)


def test_models(client: anthropic.Anthropic, server: Server) -> None:
    (model,) = client.models.list().data
    ModelInfo.model_validate_json(model.model_dump_json(), strict=True)
    assert client.models.retrieve(MODEL).id == model.id == MODEL
    assert server.get("/v1/models").json()["object"] == "list"  # OpenAI's clients send no version


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'claude-9' is not served here"):
        client.messages.create(model="claude-9", messages=USER, max_tokens=5)
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] is of type") as raised:
        client.messages.create(model=MODEL, messages=[{"role": "user", "content": [image]}], max_tokens=5)
    assert raised.value.body["error"]["type"] == "invalid_request_error"
    assert raised.value.request_id
