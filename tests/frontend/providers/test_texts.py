"""Texts to continue, over every wire that has them. A provider that takes completions gets them as they are."""

import json
from typing import Any

import pytest

from penstock.frontend.providers.wires.openai import OpenAIWire
from tests.frontend.providers.conftest import FakeProvider, Make, Reply
from tests.frontend.providers.streams import CHUNK, SAID, STREAMS, USAGE, sse

TEXT = "The capital of France is"


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {**CHUNK, "object": "text_completion", "choices": [choice], "usage": None}


COMPLETION = sse(
    piece("Köln "), piece("🌧"), piece(" – ja."), piece("", "length"), {"choices": [], "usage": USAGE}, "[DONE]"
)
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "remote", "prompt": TEXT, "max_tokens": 40}),
    ("/generate", {"inputs": TEXT, "parameters": {"max_new_tokens": 40}}),
    ("/", {"inputs": TEXT, "parameters": {"max_new_tokens": 40}}),
    (
        "/api/generate",
        {"model": "remote", "prompt": TEXT, "raw": True, "stream": False, "options": {"num_predict": 40}},
    ),
    ("/v2/models/remote/generate", {"text_input": TEXT, "max_tokens": 40}),
    ("/v2/models/remote/infer", {"inputs": [TENSOR], "parameters": {"max_tokens": 40}}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("accepts", [["completions"], []])
async def test_every_wire(
    gateway: Make, provider: FakeProvider, path: str, body: dict[str, Any], accepts: list[str]
) -> None:
    site = await gateway(local=False, accepts=accepts)
    provider.replies = [Reply(COMPLETION if accepts else STREAMS["openai"][0])]
    response = await site.http.post(path, json=body)
    assert response.status_code == 200 and json.dumps(SAID, ensure_ascii=False) in response.text, response.text
    sent = provider.requests[0]
    assert sent["max_tokens"] == 40 and sent["stream"] is True
    if accepts:
        assert provider.headers[0]["path"] == "/v1/completions"
        assert sent["prompt"] == TEXT and "messages" not in sent and "suffix" not in sent
    else:
        assert provider.headers[0]["path"] == "/v1/chat/completions"
        assert sent["messages"] == [{"role": "user", "content": TEXT}] and "prompt" not in sent


async def test_tgis_answers_have_no_tokens(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway(local=False, accepts=["completions"])
    provider.replies = [Reply(COMPLETION)]
    fields = {"inputs": TEXT, "parameters": {"details": True, "stop": ["x"], "seed": 3}}
    answer = (await site.http.post("/generate", json=fields)).json()
    details = {"finish_reason": "length", "generated_tokens": 50, "seed": 3, "prefill": [], "tokens": []}
    assert answer == {"generated_text": SAID, "details": details}
    assert provider.requests[0]["temperature"] == 0.0 and provider.requests[0]["stop"] == ["x"]
    stream = (await site.http.post("/generate_stream", json=fields)).text
    events = [json.loads(event.removeprefix("data:")) for event in stream.split("\n\n")[:-1]]
    assert "".join(event["token"]["text"] for event in events) == SAID
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["generated_text"] == SAID and events[-1]["details"]["generated_tokens"] == 50
    assert events[-1]["token"] == {"id": -1, "text": "", "logprob": None, "special": True}
    assert all(event["generated_text"] is None and event["token"]["id"] == -1 for event in events[:-1])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"inputs": TEXT, "parameters": {"top_n_tokens": 2}}, "parameters.top_n_tokens"),
        ("/generate", {"inputs": TEXT, "parameters": {"truncate": 2}}, "parameters.truncate"),
        ("/generate", {"inputs": TEXT, "parameters": {"decoder_input_details": True, "details": True}}, "decoder"),
        ("/generate", {"inputs": TEXT, "parameters": {"grammar": {"type": "regex", "value": "a+"}}}, "grammar"),
        ("/generate", {"inputs": "", "parameters": {}}, "inputs is empty"),
        ("/api/generate", {"model": "remote", "prompt": TEXT, "suffix": "x"}, "suffix"),
        ("/v1/completions", {"model": "remote", "prompt": TEXT, "suffix": "x"}, "suffix"),
        ("/v1/completions", {"model": "remote", "prompt": [TEXT, TEXT]}, "one text"),
        ("/v1/completions", {"model": "remote", "prompt": TEXT, "logprobs": 1}, "logprobs"),
        ("/v2/models/remote/generate", {"text_input": TEXT, "top_k": 3}, "top_k"),
        ("/v1/messages/count_tokens", {"model": "remote", "messages": [{"role": "user", "content": "a"}]}, "tokenizer"),
        ("/v1/responses/input_tokens", {"model": "remote", "input": "a"}, "tokenizer"),
        ("/tokenize", {"model": "remote", "prompt": "a"}, "tokenizer"),
        ("/detokenize", {"model": "remote", "tokens": [1]}, "tokenizer"),
        ("/v1/embeddings", {"model": "remote", "input": "a"}, "remote"),
        ("/api/embed", {"model": "remote", "input": "a"}, "remote"),
        ("/v1/rerank", {"model": "remote", "query": "a", "documents": ["b"]}, "remote"),
    ],
)
async def test_what_a_provider_lacks_is_refused(
    gateway: Make, provider: FakeProvider, path: str, body: dict[str, Any], param: str
) -> None:
    site = await gateway(local=False)
    response = await site.http.post(path, json=body)
    assert response.status_code in (400, 422) and param in response.text, response.text
    assert not provider.requests


async def test_a_suffix_is_sent_with_a_text(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway(local=False, accepts=["completions"])
    provider.replies = [Reply(COMPLETION)]
    for path, body in (ROUTES[0], ROUTES[3]):
        assert (await site.http.post(path, json={**body, "suffix": " end"})).status_code == 200
    assert [(sent["prompt"], sent["suffix"]) for sent in provider.requests] == [(TEXT, " end")] * 2


async def test_a_text_goes_on_after_its_stream_broke(gateway: Make, provider: FakeProvider) -> None:
    site = await gateway(local=False, accepts=["completions"])
    provider.replies = [Reply(sse(piece("Köln ")), cut=True), Reply(COMPLETION)]
    response = await site.http.post("/v1/completions", json=ROUTES[0][1])
    assert response.json()["choices"][0]["text"] == f"Köln {SAID}", response.text
    assert provider.requests[1]["prompt"] == f"{TEXT}Köln " and provider.requests[1]["max_tokens"] < 40


async def test_a_request_is_translated_once(
    gateway: Make, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, body = [], OpenAIWire.body

    def counted(self: OpenAIWire, question: Any) -> dict[str, Any]:
        made.append(question.name)
        return body(self, question)

    monkeypatch.setattr(OpenAIWire, "body", counted)
    site = await gateway()
    provider.replies = [Reply(status=500), Reply(STREAMS["openai"][0])]
    assert (await site.ask()).status_code == 200  # at the second try
    assert made == ["upstream"] and len(provider.requests) == 2
