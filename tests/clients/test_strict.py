"""Answers and events against the types of `openai` and `anthropic`, strictly: nothing is missing, has another type or
an unknown value, and no field is unknown but those that docs/clients.md names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.pagination import SyncPage as AnthropicPage
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.pagination import SyncCursorPage, SyncPage
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import InputTokenCountResponse, Response
from openai.types.responses.response_item_list import ResponseItemList
from openai.types.responses.response_stream_event import ResponseStreamEvent
from websockets.sync.client import connect

from tests.clients.strict import unknown_fields
from tests.e2e.server import Server, serving
from tests.patience import PATIENCE

USER = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
ITEM: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
PAGE = {"object", "first_id", "last_id"}  # OpenAI's lists have them; the type of a page does not


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def post(http: httpx.Client, path: str, **fields: Any) -> str:
    return http.post(path, json={"model": "smollm2", "temperature": 0, **fields}).raise_for_status().text


def events(http: httpx.Client, path: str, **fields: Any) -> list[str]:
    """The events of a stream as JSON."""
    blocks = post(http, path, stream=True, **fields).removesuffix("\n\n").split("\n\n")
    return [data for block in blocks if (data := block.partition("data: ")[2]) != "[DONE]"]


def unknown(kind: Any, texts: list[str]) -> set[str]:
    assert texts
    return set().union(*(unknown_fields(kind, text) for text in texts))


CHATS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2, "n": 2, "seed": 1},
    {"tools": [CALL], "tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}},
]


@pytest.mark.parametrize("fields", CHATS)
def test_chats(http: httpx.Client, fields: dict[str, Any]) -> None:
    fields = {"messages": USER, "max_tokens": 24, **fields}
    assert not unknown(ChatCompletion, [post(http, "/v1/chat/completions", **fields)])
    found = events(http, "/v1/chat/completions", **fields, stream_options={"include_usage": True})
    assert not unknown(ChatCompletionChunk, found)


def test_completions(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 4, "logprobs": 2}
    assert not unknown(Completion, [post(http, "/v1/completions", **fields)])
    *found, usage = events(http, "/v1/completions", **fields, stream_options={"include_usage": True})
    # A chunk's reason is null until the last one, as OpenAI's are; the type has only whole answers.
    chunks = [json.loads(text) for text in found]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    whole = [text.replace('"finish_reason":null', '"finish_reason":"stop"') for text in found]
    assert not unknown(Completion, [*whole, usage])


RESPONSES: list[dict[str, Any]] = [
    {"instructions": "Be brief.", "metadata": {"a": "b"}},
    {"tools": [ITEM], "tool_choice": "required"},
    {"text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}},
]


@pytest.mark.parametrize("fields", RESPONSES)
def test_responses(http: httpx.Client, fields: dict[str, Any]) -> None:
    fields = {"input": "What is the weather in Paris?", "max_output_tokens": 24, **fields}
    text = post(http, "/v1/responses", **fields)
    path = f"/v1/responses/{json.loads(text)['id']}"
    assert unknown(Response, [text, http.get(path).text]) == {"store"}
    assert not unknown(ResponseItemList, [http.get(f"{path}/input_items").text])
    found = unknown(ResponseStreamEvent, events(http, "/v1/responses", **fields))
    # `name` of response.function_call_arguments.done is in the types of version 2.
    assert found - {"name"} == {"response.store"} and ("name" in found) <= ("tools" in fields)


def test_responses_over_a_websocket(server: Server) -> None:
    with connect(server.url.replace("http", "ws") + "/v1/responses") as opened:
        opened.send(json.dumps({"type": "response.create", "input": "Why?", "max_output_tokens": 8, "temperature": 0}))
        found: list[str] = []
        while not found or '"type":"response.incomplete"' not in found[-1]:
            found.append(str(opened.recv(timeout=PATIENCE)))
    assert unknown(ResponseStreamEvent, found) == {"response.store"}


def test_embeddings(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "4", "--state-dir", "none")
    with serving(tmp_path / "log", *flags, model="all-minilm-l6-v2") as encoder:
        inputs: list[tuple[Any, int]] = [
            ("A river.", 1),
            (["A river.", "A stream."], 2),
            ([101, 102], 1),
            ([[101]] * 3, 3),
        ]
        for given, count in inputs:
            answer = encoder.post("/v1/embeddings", {"input": given, "encoding_format": "float"})
            assert not unknown_fields(CreateEmbeddingResponse, answer.text)
            assert len(answer.json()["data"]) == count


def test_what_has_no_stream(http: httpx.Client) -> None:
    vllm = {"root", "parent", "max_model_len", "fingerprint"}
    assert unknown(SyncPage[Model], [http.get("/v1/models").text]) == {f"data.[].{name}" for name in vllm}
    assert unknown(Model, [http.get("/v1/models/smollm2").text]) == vllm
    counted = http.post("/v1/responses/input_tokens", json={"input": "hello"}).text
    assert not unknown(InputTokenCountResponse, [counted])
    line = json.dumps({"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}})
    form = {"files": {"file": ("in.jsonl", line.encode())}, "data": {"purpose": "batch"}}
    file = http.post("/v1/files", **form).text
    body = {"input_file_id": json.loads(file)["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=body).text
    assert not unknown(Batch, [batch, http.get(f"/v1/batches/{json.loads(batch)['id']}").text])
    assert not unknown(FileObject, [file])
    assert unknown(SyncCursorPage[FileObject], [http.get("/v1/files").text]) == PAGE
    assert unknown(SyncCursorPage[Batch], [http.get("/v1/batches").text]) == PAGE
    assert not unknown(FileDeleted, [http.delete(f"/v1/files/{json.loads(file)['id']}").text])


MESSAGES: list[dict[str, Any]] = [
    {"system": "Be brief.", "stop_sequences": ["."]},
    {"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
]


@pytest.mark.parametrize("fields", MESSAGES)
def test_messages(http: httpx.Client, fields: dict[str, Any]) -> None:
    fields = {"messages": USER, "max_tokens": 24, **fields}
    assert not unknown(Message, [post(http, "/v1/messages", **fields)])
    found = [text for text in events(http, "/v1/messages", **fields) if text != '{"type":"ping"}']
    assert not unknown(RawMessageStreamEvent, found)


def test_what_anthropic_has_beside_messages(http: httpx.Client) -> None:
    counted = http.post("/v1/messages/count_tokens", json={"model": "smollm2", "messages": USER}).text
    assert not unknown(MessageTokensCount, [counted])
    models = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).text
    assert not unknown(AnthropicPage[ModelInfo], [models])
    wrong = http.post("/v1/messages", json={"model": "other", "messages": USER, "max_tokens": 3})
    assert not unknown(ErrorResponse, [wrong.text])
