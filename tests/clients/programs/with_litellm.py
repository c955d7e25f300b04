"""litellm with its providers for OpenAI's, Anthropic's and Ollama's wires: streams, tools, schemas, embeddings.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import waits for a network

import litellm
from arguments import EMBEDDER, EMBEDDER_SERVER, EMBEDDINGS, MODEL, SERVER, TEXTS, far

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PARAMETERS, "strict": True}}
# What a 404 becomes depends on the provider and the version.
FAILURES = (litellm.exceptions.NotFoundError, litellm.exceptions.APIError, litellm.exceptions.APIConnectionError)
PROVIDERS = {"openai": SERVER + "/v1", "anthropic": SERVER, "ollama_chat": SERVER, "ollama": SERVER}


def fields(provider: str) -> dict[str, Any]:
    base: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": PROVIDERS[provider], "api_key": "unused"}
    return base | {"messages": MESSAGES, "temperature": 0}


def text_of(chunk: Any) -> str:
    return chunk.choices[0].delta.content or ""


def talks(provider: str) -> None:
    short = fields(provider) | {"max_tokens": 20}
    whole = litellm.completion(**short)
    text = whole.choices[0].message.content
    assert text and "".join(map(text_of, litellm.completion(**short, stream=True))) == text, provider
    assert whole.usage.completion_tokens == 20, provider

    async def streamed() -> str:
        return "".join([text_of(chunk) async for chunk in await litellm.acompletion(**short, stream=True)])

    assert asyncio.run(streamed()) == text, provider


def calls(provider: str) -> None:
    """A tool that must be called, whole and in a stream."""
    long = fields(provider) | {"max_tokens": 100, "tools": TOOLS, "tool_choice": "required"}
    (call,) = litellm.completion(**long).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city", "unit"}
    parts = [
        part for chunk in litellm.completion(**long, stream=True) for part in chunk.choices[0].delta.tool_calls or ()
    ]
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == json.loads(call.function.arguments)


def embeds() -> None:
    for provider, base in (("openai", EMBEDDER_SERVER + "/v1"), ("ollama", EMBEDDER_SERVER)):
        answer = litellm.embedding(f"{provider}/{EMBEDDER}", input=TEXTS, api_base=base, api_key="unused")
        assert far([each["embedding"] for each in answer.data], EMBEDDINGS) < 1e-4, provider


def fails() -> None:
    for provider, base in PROVIDERS.items():
        raised = ""
        try:
            litellm.completion(f"{provider}/other", api_base=base, api_key="unused", messages=MESSAGES, max_retries=0)
        except FAILURES as error:
            raised = str(error)
        assert "other" in raised, (provider, raised)


for name in PROVIDERS:
    talks(name)
for name in ("openai", "anthropic"):  # Ollama's API has no way to require a call
    calls(name)
for name in ("openai", "ollama_chat"):
    answered = litellm.completion(**fields(name), max_tokens=100, response_format=SCHEMA)
    assert set(json.loads(answered.choices[0].message.content)) == {"city", "unit"}, name
embeds()
fails()
