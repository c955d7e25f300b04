"""The `openai` package, whatever its version: sync and async, streams, tools, parse, responses, files and batches.

Run by test_matrix.py in an environment of its own; its arguments are the server's URL and the model."""

import asyncio
import json
import sys
import time
from typing import Any

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1] + "/v1", sys.argv[2]
USER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


class City(BaseModel):
    city: str


async def chats(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "messages": USER, "max_tokens": 20}
    whole = await client.chat.completions.create(**fields)
    text = ""
    async for chunk in await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        text += (chunk.choices and chunk.choices[0].delta.content) or ""
    assert text == whole.choices[0].message.content != "" and chunk.usage.completion_tokens == 20
    plain = await client.completions.create(**GREEDY, prompt="The capital of France is", max_tokens=8, logprobs=2)
    assert "Paris" in plain.choices[0].text and len(plain.choices[0].logprobs.tokens) == 8
    raised = False
    try:
        await client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)
    except openai.BadRequestError as error:
        raised = error.param == "temperature"
    assert raised
    assert [model.id async for model in client.models.list()] == [MODEL]


async def tools_and_schemas(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "messages": USER, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
    whole = await client.chat.completions.create(**fields)
    (call,) = whole.choices[0].message.tool_calls
    arguments = ""
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            arguments += part.function.arguments or ""
    assert json.loads(arguments) == json.loads(call.function.arguments) and "city" in arguments
    parsing = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    parsed = await parsing(**GREEDY, messages=USER, max_tokens=60, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)


async def responses(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "input": "Name a river.", "max_output_tokens": 20}
    first = await client.responses.create(**fields)
    kinds, text = [], ""
    async for event in await client.responses.create(**fields, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == first.output_text != "" and kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    longer = {**fields, "max_output_tokens": 60}  # `stream` takes no response that is cut
    async with client.responses.stream(**longer, text_format=City) as stream:
        assert isinstance((await stream.get_final_response()).output_parsed, City)
    again = await client.responses.create(**{**fields, "input": "Another."}, previous_response_id=first.id)
    assert again.previous_response_id == first.id
    assert (await client.responses.retrieve(first.id)).output_text == text
    assert isinstance((await client.responses.parse(**longer, text_format=City)).output_parsed, City)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    called = await client.responses.create(**longer, tools=[tool], tool_choice="required")
    assert [item.type for item in called.output] == ["function_call"]
    assert (await client.responses.input_items.list(first.id)).data[0].role == "user"
    await client.responses.delete(first.id)


async def files_and_batches(client: openai.AsyncOpenAI) -> None:
    body = {"messages": USER, "max_tokens": 5}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(4)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (await client.files.retrieve(file.id)).bytes == len(content)
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    end = time.monotonic() + 60
    while batch.status != "completed":
        assert time.monotonic() < end and batch.status in ("validating", "in_progress", "finalizing"), batch
        await asyncio.sleep(0.05)
        batch = await client.batches.retrieve(batch.id)
    answers = (await client.files.content(batch.output_file_id)).text.splitlines()
    assert sorted(json.loads(answer)["custom_id"] for answer in answers) == list("0123")
    assert batch.id in [found.id async for found in client.batches.list()]
    for file_id in (file.id, batch.output_file_id):
        assert (await client.files.delete(file_id)).deleted


async def main() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0) as client:
        for part in (chats, tools_and_schemas, responses, files_and_batches):
            await part(client)
    sync = openai.OpenAI(base_url=URL, api_key="unused", max_retries=0)
    stream = sync.chat.completions.create(**GREEDY, messages=USER, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert sync.responses.create(**GREEDY, input="Hello", max_output_tokens=5).output_text


asyncio.run(main())
