"""Tools with the unmodified `openai` client and SmolLM2."""

import json
from enum import Enum
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.server import Server

MODEL = "smollm2"
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "description": "The time"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_obeys_the_schema_whatever_the_seed(client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {"messages": USER, "tools": [WEATHER, TIME], "tool_choice": choice, "max_tokens": 200}
    schemas = {"get_weather": WEATHER["function"]["parameters"], "get_time": {"type": "object", "maxProperties": 0}}
    for seed in range(3):
        answer = client.chat.completions.create(model=MODEL, seed=seed, temperature=1.5, **fields).choices[0]
        (call,) = answer.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
        assert answer.message.content is None
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert call.function.name == "get_weather" or choice == "required"


def test_a_stream_gives_what_the_whole_answer_gives(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"messages": USER, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    whole = client.chat.completions.create(model=MODEL, temperature=0, **fields).choices[0]
    chunks = list(client.chat.completions.create(model=MODEL, temperature=0, stream=True, **fields))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].function.name == "get_weather" and deltas[0].function.arguments == ""
    assert all(delta.id is None and delta.function.name is None and delta.index == 0 for delta in deltas[1:])
    assert len(deltas) > 1  # speculation may bring most of an answer that was given before at once
    assert "".join(delta.function.arguments for delta in deltas) == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_a_conversation_with_a_result(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=USER, tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=0
    ).choices[0]
    (call,) = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 21 degrees and raining."}
    messages = [*USER, first.message, result]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=60, temperature=0
    ).choices[0]
    assert answer.message.content and "21" in answer.message.content
    assert answer.message.tool_calls is None and answer.finish_reason in ("stop", "length")


class Unit(Enum):
    celsius = "C"
    fahrenheit = "F"


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    unit: Unit


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def test_parse(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    answer = client.chat.completions.parse(
        model=MODEL, messages=USER, tools=[tool], tool_choice="required", max_tokens=200, temperature=0
    ).choices[0]
    (call,) = answer.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather) and call.function.parsed_arguments.city
    messages = [{"role": "user", "content": "Anna is 31 years old. Who is she?"}]
    parsed = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Person, max_tokens=200, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    # Both at once: the model may call the tool or answer with the schema.
    both = client.chat.completions.parse(
        model=MODEL, messages=messages, tools=[tool], response_format=Person, max_tokens=200, temperature=0
    ).choices[0]
    assert both.message.tool_calls or isinstance(both.message.parsed, Person)


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    with client.chat.completions.stream(
        model=MODEL, messages=USER, tools=[tool], tool_choice="required", max_tokens=200, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather)


def test_a_schema_that_cannot_be_held_is_named(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="'not'") as refused:
        client.chat.completions.create(model=MODEL, messages=USER, tools=[tool], tool_choice="required")
    assert refused.value.param == "tools[0].function.parameters"
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[tool], max_tokens=5)
    assert answer.choices[0].finish_reason in ("length", "stop")
