"""Our own server as a provider behind itself, with both companies' Python packages as clients."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.server import Server, serving
from tests.smollm2 import smollm2

pytestmark = pytest.mark.rare  # two servers, of which one has an engine
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
LIMITS: Any = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server with a model, and a gateway to it, by both APIs."""
    folder: Path = tmp_path_factory.mktemp("gateway")
    flags = ("--max-num-seqs", "8", "--kv-cache-memory", "256MiB", "--served-model-name", "smollm2")
    with serving(folder / "behind", *flags, model=str(smollm2())) as behind:
        entry = {"url": f"{behind.url}/v1", "private": True, "accepts": ["prefix", "top_k"]}
        models = {kind: {"kind": kind, **entry, "models": {f"by-{kind}": {"model": "smollm2"}}} for kind in KINDS}
        file = folder / "providers.yaml"
        file.write_text(json.dumps({"providers": models}))
        with serving(folder / "gateway", "--providers", str(file), model=None) as gateway:
            yield behind, gateway


KINDS = ("openai", "anthropic")


def said(server: Server, model: str) -> list[tuple[str, int, int, str]]:
    """What each client gets, whole and streamed: the text, tokens of prompt and output, and why it ended."""
    found = []
    with openai.OpenAI(api_key="x", base_url=f"{server.url}/v1") as client:
        made = client.chat.completions.create(model=model, messages=MESSAGES, **LIMITS)
        assert made.usage is not None and made.choices[0].message.content
        choice, usage = made.choices[0], made.usage
        found.append((choice.message.content, usage.prompt_tokens, usage.completion_tokens, choice.finish_reason))
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(model=model, messages=MESSAGES, **LIMITS, **options)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        usage, reason = last.usage, chunks[-1].choices[0].finish_reason
        found.append((text, usage.prompt_tokens, usage.completion_tokens, reason))
    with anthropic.Anthropic(api_key="x", base_url=server.url) as theirs:
        with theirs.messages.stream(model=model, messages=MESSAGES, max_tokens=12, extra_body=ZERO) as stream:
            message = stream.get_final_message()
        counts = message.usage
        prompt = counts.input_tokens + (counts.cache_read_input_tokens or 0)
        assert message.content[0].type == "text"
        found.append((message.content[0].text, prompt, counts.output_tokens, message.stop_reason))
    return found


ZERO = {"temperature": 0.0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_gateway_gives_what_the_server_behind_it_gives(servers: tuple[Server, Server], kind: str) -> None:
    behind, gateway = servers
    assert said(gateway, f"by-{kind}") == said(behind, "smollm2")


def test_tools_grammars_and_prefixes_pass_through(servers: tuple[Server, Server]) -> None:
    behind, gateway = servers
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "answer", "parameters": schema}}
    started = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    for fields in (
        {"tools": [tool], "tool_choice": "required", "max_tokens": 60},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, "max_tokens": 60},
        {"messages": started, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 4},
    ):
        answers = []
        for server, model in ((behind, "smollm2"), (gateway, "by-openai")):
            body = {"model": model, "messages": MESSAGES, "temperature": 0, **fields}
            choice = server.post("/v1/chat/completions", body).json()["choices"][0]
            for call in choice["message"].get("tool_calls", ()):
                call.pop("id")
            answers.append((choice["message"], choice["finish_reason"]))
        assert answers[0] == answers[1]
