"""Reasoning and thinking against the types of `openai` and `anthropic`, strictly, over a scripted engine: the models of
tests/clients/test_strict.py do not reason."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent

from tests.clients.strict import unknown_fields
from tests.frontend.conftest import NAME, Site

SAID = '<think>\nhm\n</think>\n\nYes é.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OBJECT = {"type": "object"}
MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 200,
    "tools": [{"name": "add", "input_schema": OBJECT}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
RESPONSE: dict[str, Any] = {
    "input": "hello",
    "max_output_tokens": 200,
    "tools": [{"type": "function", "name": "add", "parameters": OBJECT}],
    "reasoning": {"effort": "low", "summary": "auto"},
}


async def whole(site: Site, path: str, fields: dict[str, Any]) -> str:
    answer = await site.http.post(path, json={"model": NAME, **fields})
    assert answer.status_code == 200, answer.text
    return answer.text


async def events(site: Site, path: str, fields: dict[str, Any]) -> list[str]:
    text = await whole(site, path, {**fields, "stream": True})
    found = [block.partition("data: ")[2] for block in text.removesuffix("\n\n").split("\n\n")]
    return [data for data in found if data != '{"type":"ping"}']


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_thinking_blocks(sites: Callable[..., Site], cut: int) -> None:
    site = sites()
    site.says(SAID, cuts=(cut,))
    text = await whole(site, "/v1/messages", MESSAGE)
    assert [block["type"] for block in json.loads(text)["content"]] == ["thinking", "text", "tool_use"]
    assert not unknown_fields(Message, text)
    found = await events(site, "/v1/messages", MESSAGE)
    assert any('"signature_delta"' in data for data in found) and any('"thinking_delta"' in data for data in found)
    for data in found:
        assert not unknown_fields(RawMessageStreamEvent, data), data


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_reasoning_items(sites: Callable[..., Site], cut: int) -> None:
    site = sites()
    site.says(SAID, cuts=(cut,))
    text = await whole(site, "/v1/responses", RESPONSE)
    assert [item["type"] for item in json.loads(text)["output"]] == ["reasoning", "message", "function_call"]
    assert unknown_fields(Response, text) == {"store"}
    found = await events(site, "/v1/responses", RESPONSE)
    assert any('"response.reasoning_text.delta"' in data for data in found)
    for data in found:
        # `name` of response.function_call_arguments.done is in the types of version 2.
        assert unknown_fields(ResponseStreamEvent, data) <= {"response.store", "name"}, data
