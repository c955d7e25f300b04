"""The `ollama` package, whatever its version: generate, chat, embed, streams, tools, formats and the list of models.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import asyncio
import json
from typing import Any

import ollama
from arguments import EMBEDDER, EMBEDDER_SERVER, EMBEDDINGS, MODEL, SERVER, TEXTS, far

USER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
OPTIONS: Any = {"num_predict": 20, "temperature": 0}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}},
    },
}


def sync(client: ollama.Client) -> None:
    whole = client.chat(MODEL, USER, options=OPTIONS)
    parts = [part["message"]["content"] for part in client.chat(MODEL, USER, options=OPTIONS, stream=True)]
    assert "".join(parts) == whole["message"]["content"] != ""
    story: Any = [{"role": "user", "content": "Tell me a long story about a river."}]
    # On a busy machine some pieces come together.
    assert len(list(client.chat(MODEL, story, options=OPTIONS | {"num_predict": 150}, stream=True))) > 5
    said = client.generate(MODEL, "The capital of France is", raw=True, options=OPTIONS)
    assert "Paris" in said["response"] and said["eval_count"] == 20
    assert any(MODEL in (model.get("model") or model.get("name")) for model in client.list()["models"])
    assert client.show(MODEL)["details"] and client.ps()["models"]
    assert json.loads(
        client.chat(MODEL, USER, format="json", options=OPTIONS | {"num_predict": 80})["message"]["content"]
    )
    assert client.chat(MODEL, USER, tools=[TOOL], options=OPTIONS)["message"] is not None
    raised = False
    try:
        client.chat("other", USER)
    except ollama.ResponseError as error:
        raised = error.status_code == 404
    assert raised


def embeddings(client: ollama.Client) -> None:
    assert far(client.embed(EMBEDDER, TEXTS)["embeddings"], EMBEDDINGS) < 1e-4
    assert far([client.embeddings(EMBEDDER, TEXTS[0])["embedding"]], EMBEDDINGS[:1]) < 1e-4


async def asynchronous(client: ollama.AsyncClient) -> None:
    parts = [part async for part in await client.generate(MODEL, "Once", options=OPTIONS, stream=True)]
    assert parts[-1]["done"] and "".join(part["response"] for part in parts)


sync(ollama.Client(host=SERVER))
embeddings(ollama.Client(host=EMBEDDER_SERVER))
asyncio.run(asynchronous(ollama.AsyncClient(host=SERVER)))
