"""The `anthropic` package, whatever its version: messages, streams, tools, token counts, models, errors.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import asyncio
from typing import Any

import anthropic
from arguments import GATEWAY, MODEL, SERVER

USER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}
GREEDY: dict[str, Any] = {"model": MODEL, "extra_body": {"temperature": 0}}  # newer versions have no such parameter


def sync(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {**GREEDY, "messages": USER, "max_tokens": 20}
    whole = client.messages.create(**fields, system="Be brief.")
    with client.messages.stream(**fields, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
    assert text == whole.content[0].text != "" and whole.stop_reason == "max_tokens"
    events = [event.type for event in client.messages.create(**fields, stream=True)]
    assert events[0] == "message_start" and events[-1] == "message_stop"
    counted = 0
    try:
        counted = client.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    except anthropic.BadRequestError as error:
        counted = -1 if "its tokenizer is not here" in str(error) else 0
    assert counted == -1 if GATEWAY else counted > 5, counted
    assert [model.id for model in client.models.list()] == [MODEL]
    raised = False
    try:
        client.messages.create(model="other", messages=USER, max_tokens=5)
    except anthropic.NotFoundError as error:
        raised = "is not served here" in str(error)
    assert raised


async def with_tools(client: anthropic.AsyncAnthropic) -> None:
    fields: dict[str, Any] = {**GREEDY, "max_tokens": 60, "tools": [TOOL]}
    whole = await client.messages.create(**fields, messages=USER, tool_choice={"type": "any"})
    (call,) = whole.content
    assert whole.stop_reason == "tool_use" and call.input["city"] in ("Paris", "Rome")
    async with client.messages.stream(**fields, messages=USER, tool_choice={"type": "any"}) as stream:
        final = await stream.get_final_message()
    assert final.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    messages = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert (await client.messages.create(**fields, messages=messages)).content


sync(anthropic.Anthropic(base_url=SERVER, api_key="unused", max_retries=0))
asyncio.run(with_tools(anthropic.AsyncAnthropic(base_url=SERVER, api_key="unused", max_retries=0)))
