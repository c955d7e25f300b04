"""The `openai` package, whatever its version: sync and async, streams, tools, parse, responses, embeddings, files and
batches.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import asyncio
import json
import time
from typing import Any

import openai
from arguments import EMBEDDER, EMBEDDER_SERVER, EMBEDDINGS, GATEWAY, MODEL, SERVER, TEXTS, far
from pydantic import BaseModel

URL = SERVER + "/v1"
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
    plain: dict[str, Any] = {**GREEDY, "prompt": "The capital of France is", "max_tokens": 8}
    assert "Paris" in (await client.completions.create(**plain)).choices[0].text
    if not GATEWAY:
        assert len((await client.completions.create(**plain, logprobs=2)).choices[0].logprobs.tokens) == 8
    for wrong in ({"temperature": -1}, {"logprobs": True} if GATEWAY else {"max_tokens": 0}):
        raised = False
        try:
            await client.chat.completions.create(model=MODEL, messages=USER, **wrong)
        except openai.BadRequestError as error:
            raised = error.param in wrong
        assert raised, wrong
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


async def embeddings(client: openai.AsyncOpenAI) -> None:
    for encoding in ({}, {"encoding_format": "float"}):  # without, the client asks for base64 and decodes it
        answer = await client.embeddings.create(model=EMBEDDER, input=TEXTS, **encoding)
        assert far([each.embedding for each in answer.data], EMBEDDINGS) < 1e-4
        assert [each.index for each in answer.data] == list(range(len(TEXTS))) and answer.usage.prompt_tokens > 9


def sync(client: openai.OpenAI) -> None:
    chat: dict[str, Any] = {**GREEDY, "messages": USER, "max_tokens": 60}
    stream = client.chat.completions.create(**chat, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == client.chat.completions.create(**chat).choices[0].message.content != ""
    called = client.chat.completions.create(**chat, tools=[TOOL], tool_choice="required")
    assert "city" in json.loads(called.choices[0].message.tool_calls[0].function.arguments)
    parsing = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    assert isinstance(parsing(**chat, response_format=City).choices[0].message.parsed, City)
    pieces = client.completions.create(**GREEDY, prompt="The capital of France is", max_tokens=8, stream=True)
    assert "Paris" in "".join(piece.choices[0].text for piece in pieces)

    fields: dict[str, Any] = {**GREEDY, "input": "Name a river.", "max_output_tokens": 60}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text != ""
    assert isinstance(client.responses.parse(**fields, text_format=City).output_parsed, City)

    file = client.files.create(file=("in.jsonl", b'{"custom_id": "0"}'), purpose="batch")
    assert client.files.content(file.id).read() == b'{"custom_id": "0"}'
    assert file.id in [found.id for found in client.files.list()]
    # A line without a body fails; that one request fails is no failure of the batch.
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert client.batches.retrieve(batch.id).endpoint == "/v1/completions"
    assert client.files.delete(file.id).deleted


async def main() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0) as client:
        for part in (chats, tools_and_schemas, responses, files_and_batches):
            await part(client)
    async with openai.AsyncOpenAI(base_url=f"{EMBEDDER_SERVER}/v1", api_key="unused", max_retries=0) as client:
        await embeddings(client)
    sync(openai.OpenAI(base_url=URL, api_key="unused", max_retries=0))


asyncio.run(main())
