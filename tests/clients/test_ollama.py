"""Ollama's wire with the unmodified `ollama` client and SmolLM2."""

import json
from typing import Any

import jsonschema
import ollama
import pytest

from tests.e2e.server import Server

MODEL = "smollm2"
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
OPTIONS = {"temperature": 0, "num_predict": 20, "seed": 1}


def get_weather(city: str, unit: str) -> str:
    """The weather of a city.

    Args:
        city: the city
        unit: C or F
    """
    return f"It is 21 degrees {unit} in {city}."


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_a_chat_and_its_stream_are_the_same(client: ollama.Client) -> None:
    whole = client.chat(MODEL, USER, options=OPTIONS)
    chunks = list(client.chat(f"{MODEL}:latest", USER, options=OPTIONS, stream=True, keep_alive="5m"))
    assert "".join(chunk.message.content for chunk in chunks) == whole.message.content != ""
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True] and len(
        chunks
    ) > 3  # drafts give several tokens at once
    for last in (whole, chunks[-1]):
        assert last.done_reason == "length" and last.eval_count == 20 and last.prompt_eval_count > 10
        assert last.total_duration == pytest.approx(last.prompt_eval_duration + last.eval_duration, abs=2)
        assert last.prompt_eval_duration > 0 and last.eval_duration > 0 and last.load_duration == 0
    assert chunks[-1].model == f"{MODEL}:latest"


def test_streams_are_lines_of_json_and_the_default(server: Server) -> None:
    answer = server.post("/api/chat", {"model": MODEL, "messages": USER, "options": OPTIONS})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n") and "\n\n" not in answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert all(line["model"] == MODEL and line["created_at"] for line in lines) and lines[-1]["done"] is True


def test_generate_and_its_context(client: ollama.Client) -> None:
    first = client.generate(MODEL, "My name is Anna.", system="Be brief.", options=OPTIONS)
    assert first.response and len(first.context) == first.prompt_eval_count + first.eval_count
    chunks = list(client.generate(MODEL, "My name is Anna.", system="Be brief.", options=OPTIONS, stream=True))
    assert "".join(chunk.response for chunk in chunks) == first.response and chunks[-1].context == first.context
    second = client.generate(MODEL, "What is my name?", context=first.context, options=OPTIONS)
    assert second.prompt_eval_count > len(first.context)


def test_a_raw_prompt_is_completed(client: ollama.Client) -> None:
    answer = client.generate(MODEL, "The capital of France is", raw=True, options={**OPTIONS, "stop": ["."]})
    assert "Paris" in answer.response and answer.done_reason == "stop" and answer.context is None
    assert answer.prompt_eval_count == 5


def test_no_prompt_loads_the_model(client: ollama.Client) -> None:
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, [], keep_alive=0).done_reason == "unload"
    assert next(client.generate(MODEL, stream=True)).done


@pytest.mark.parametrize(
    "schema", ["json", {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}]
)
def test_an_answer_holds_to_a_format(client: ollama.Client, schema: Any) -> None:
    options = {"temperature": 0, "num_predict": 60}
    answer = client.chat(MODEL, [{"role": "user", "content": "Answer a: 1"}], format=schema, options=options)
    if answer.done_reason == "stop":
        jsonschema.validate(json.loads(answer.message.content), {} if schema == "json" else schema)
    assert answer.message.content.lstrip().startswith("{")


def test_tools(client: ollama.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "Call get_weather with city Paris and unit C."}]
    options = {"temperature": 0, "num_predict": 80}
    whole = client.chat(MODEL, messages, tools=[get_weather], options=options)
    chunks = list(client.chat(MODEL, messages, tools=[get_weather], options=options, stream=True))
    streamed = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
    assert streamed == list(whole.message.tool_calls or ())
    for call in streamed:
        assert call.function.name == "get_weather" and set(call.function.arguments) == {"city", "unit"}
    called = {"function": {"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [called]}]
    messages += [{"role": "tool", "tool_name": "get_weather", "content": "It is 21 degrees and raining."}]
    assert client.chat(MODEL, messages, options=options).message.content


def test_logprobs(client: ollama.Client) -> None:
    answer = client.chat(MODEL, USER, logprobs=True, top_logprobs=2, options=OPTIONS)
    assert len(answer.logprobs) == answer.eval_count
    assert answer.logprobs[0].logprob == answer.logprobs[0].top_logprobs[0].logprob


def test_models(client: ollama.Client, server: Server) -> None:
    (model,) = client.list().models
    (running,) = client.ps().models
    assert model.model == running.name == f"{MODEL}:latest" and model.digest == running.digest
    assert model.size == 98_362_432 and model.details is not None and model.details.format == "gguf"
    shown = client.show(model.model)
    assert "completion" in shown.capabilities and "im_start" in shown.template
    assert shown.modelinfo["llama.context_length"] == running.context_length
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    for details in (shown.details, model.details, running.details):
        assert details is not None
        assert (details.family, details.parameter_size, details.quantization_level) == ("llama", "134.52M", "Q4_1")
    assert client.pull(MODEL).status == "success" == next(client.pull(MODEL, stream=True)).status
    assert server.get("/").text == "Ollama is running"
    assert server.get("/api/version").json()["version"]


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        (lambda client: client.chat("llama3", USER), 404, "'llama3' is not served here"),
        (lambda client: client.embed(MODEL, "x"), 400, "has no embeddings"),
        (lambda client: client.pull("llama3"), 403, "penstock pull"),
        (lambda client: client.delete(MODEL), 403, "penstock rm"),
        (lambda client: client.delete("llama3"), 404, "not served"),
        (lambda client: client.generate(MODEL, "x", images=["aGk="]), 400, "images is not supported"),
        (lambda client: client.generate(MODEL, "x", suffix="y", raw=True), 400, "does not support insert"),
        (lambda client: client.generate(MODEL, "x", template="{{ .Prompt }}"), 400, "template is not supported"),
        (lambda client: client.chat(MODEL, USER, options={"mirostat": 2}), 400, "options.mirostat is not supported"),
        (lambda client: client.chat(MODEL, USER, options={"tempreature": 2}), 400, "'options.tempreature'"),
        (lambda client: client.chat(MODEL, USER, format={"type": 3}), 400, "format"),
        (lambda client: list(client.chat(MODEL, [{"role": "x"}], stream=True)), 400, r"messages\[0\].role is 'x'"),
    ],
)
def test_errors_are_the_clients_own(client: ollama.Client, call: Any, status: int, message: str) -> None:
    with pytest.raises(ollama.ResponseError, match=message) as raised:
        call(client)
    assert raised.value.status_code == status
