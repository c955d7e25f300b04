"""Bad input to the wires besides OpenAI's: numbers and bytes that one part takes and the next does not, and products of
sizes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.frontend import ModelRegistry, RequestLimits, ServedModel, Serving
from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError
from penstock.frontend.requests.texts import encode_texts
from penstock.frontend.requests.tools import parse_arguments
from penstock.frontend.versions.serving import Version
from penstock.observe.metrics import Metrics
from penstock.text import Tokenizer
from penstock.text.process import WorkerProcess
from tests.frontend.conftest import NAME, Site
from tests.frontend.scripted import ScriptedClient

HUGE = 10**30
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": HUGE}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": HUGE}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": HUGE}}}]}


@pytest.mark.parametrize(
    ("path", "fields", "where"),
    [
        ("/v1/chat/completions", {"messages": [USER], "tools": [FUNCTION]}, "tools"),
        ("/api/chat", {"messages": [USER], "tools": [FUNCTION]}, "tools"),
        ("/api/chat", {"messages": [USER, CALLED, USER]}, "messages[1].tool_calls[0].function.arguments"),
        ("/v1/messages", {"messages": [USER], "tools": [{"name": "f", "input_schema": SCHEMA}]}, "tools"),
        ("/v1/messages", {"messages": [USER, USED, RESULT]}, "messages[1].content[0].input"),
    ],
)
async def test_integers_that_no_encoder_takes(
    sites: Callable[..., Site], path: str, fields: dict[str, Any], where: str
) -> None:
    more = {"max_tokens": 3} if path.startswith("/v1") else {}
    response = await sites().http.post(path, json={"model": NAME, **fields, **more})
    assert response.status_code == 400, response.text
    assert f"{where} has an integer of more than 64 bits" in response.text


@pytest.mark.parametrize("value", [str(HUGE), "-" + str(HUGE), "1" + "0" * 400, str(2**64), str(2**63 - 1)])
async def test_such_integers_of_the_model_do_not_fail_its_answer(sites: Callable[..., Site], value: str) -> None:
    site = sites(reasoning="none")
    site.says('<tool_call>\n{"name": "f", "arguments": {"a": [{"b": ' + value + "}]}}\n</tool_call>")
    anthropic = {"model": NAME, "max_tokens": 900, "messages": [USER], "tools": [{"name": "f", "input_schema": {}}]}
    plain = {"type": "function", "function": {"name": "f"}}
    ollama = {"model": NAME, "messages": [USER], "tools": [plain], "stream": False}
    said = (await site.http.post("/v1/messages", json=anthropic)).json()["content"][0]["input"]
    calls = (await site.http.post("/api/chat", json=ollama)).json()["message"]["tool_calls"]
    exact = int(value)
    wanted = exact if -(2**63) <= exact < 2**64 else float(value) if abs(exact) < 10**308 else None
    assert said == calls[0]["function"]["arguments"] == {"a": [{"b": wanted}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"required": None},
        {"required": [[1]], "properties": {}},
        {"properties": {"a": {"format": []}}},
        {"properties": {"a": {"maxLength": "x"}}},
        {"properties": {"a": {"pattern": "("}}},
    ],
)
async def test_schemas_of_tools_with_values_of_wrong_types(sites: Callable[..., Site], schema: dict[str, Any]) -> None:
    """With `auto` the arguments are then any object. A call that is required cannot be held, and the tool is named."""
    site = sites()
    site.says("hello")
    functions = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]
    functions[1]["function"]["parameters"] = {"type": "object", **schema}
    chat = {"model": NAME, "messages": [USER], "tools": functions, "max_tokens": 3}
    assert (await site.http.post("/v1/chat/completions", json=chat)).status_code == 200
    assert (await site.http.post("/api/chat", json={**chat, "max_tokens": None, "stream": False})).status_code < 500
    if "format" in str(schema):  # an unknown format is a remark
        return
    for more in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        answer = await site.http.post("/v1/chat/completions", json={**chat, **more})
        if "pattern" not in str(schema) and "tool_choice" not in more:
            assert answer.status_code == 200  # as with `auto`
            continue
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert message.startswith("tools[1].function.parameters: ") and "start:" not in message


def test_usual_arguments_stay_as_they_are() -> None:
    text = json.dumps({"a": 2**63, "b": [-(2**63), 1.5, True, None, "1" * 30]})
    assert parse_arguments(text) == json.loads(text)


@pytest.mark.parametrize("bad", [b'"\xff"', b'"\xed\xa0\x80"'])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", b'{"model":"tiny","messages":[],"format":{"description":%b}}'),
        ("/v1/completions", b'{"prompt":"x","guided_json":{"description":%b}}'),
        (
            "/v1/messages",
            b'{"model":"tiny","max_tokens":3,"messages":[{"role":"user","content":"x"}],'
            b'"output_format":{"type":"json_schema","schema":{"description":%b}}}',
        ),
        ("/generate", b'{"inputs":"x","parameters":{"grammar":{"type":"regex","value":%b}}}'),
        ("/generate", b'{"inputs":"x","parameters":{"grammar":{"type":"json_schema","value":{%b:1}}}}'),
    ],
)
async def test_schemas_that_are_not_utf8(site: Site, path: str, body: bytes, bad: bytes) -> None:
    response = await site.http.post(path, content=body % bad, headers={"content-type": "application/json"})
    assert response.status_code == (422 if path == "/generate" else 400)
    assert "the body is not UTF-8" in response.text


async def test_json_in_a_tensor_is_bounded_before_it_is_decoded(site: Site) -> None:
    given = '{"binary_data_output":[' + ",".join(["[]"] * 8000) + "]}"
    tensors = [("text_input", "hello"), ("sampling_parameters", given)]
    inputs = [{"name": name, "datatype": "BYTES", "shape": [1], "data": [text]} for name, text in tensors]
    response = await site.http.post(f"/v2/models/{NAME}/infer", json={"inputs": inputs})
    assert response.status_code == 400
    assert f"sampling_parameters has {len(given)} characters; the limit is 16384" in response.text


async def test_an_id_that_each_event_repeats_is_bounded(site: Site) -> None:
    for length, status in ((256, 200), (257, 400)):
        for action in ("generate", "generate_stream"):
            fields = {"text_input": "hello", "max_tokens": 3, "id": "x" * length}
            assert (await site.http.post(f"/v2/models/{NAME}/{action}", json=fields)).status_code == status


async def test_errors_do_not_write_huge_integers_out(site: Site) -> None:
    for path, fields in (
        ("/api/generate", {"model": NAME, "prompt": "x", "context": [10**4000]}),
        ("/generate", {"inputs": "x", "parameters": {"truncate": -(10**4000)}}),
    ):
        response = await site.http.post(path, json=fields)
        assert response.status_code in (400, 422)
        assert len(response.content) < 300


async def test_a_query_is_counted_once_for_each_document(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    tokenizer = tokenizers[0]
    engine = ScriptedClient(lambda request, choice: [], vocab_size=tokenizer.vocab_size, eos=0, max_model_len=512)
    model = ServedModel(name=NAME, client=engine, tokenizer=tokenizer, created=1)
    limits = RequestLimits(max_body_bytes=1000)
    models = ModelRegistry(Serving(model, Metrics(CollectorRegistry())))

    async def enter(name: str | None) -> Version:
        return models.find(name).version

    context = await RequestContext(models=models, enter=enter, limits=limits, id="1", created=1).for_model(None)
    pairs = [("q" * 200, "d")] * 10
    with pytest.raises(APIError, match="have 2010 characters together; the limit is 2000"):
        await encode_texts(context, pairs, "documents")


@pytest.mark.parametrize(
    ("path", "status", "fields"),
    [
        ("/v1/chat/completions", 503, {"messages": [USER], "guided_json": {"const": "chat"}}),
        ("/v1/completions", 503, {"prompt": "a", "guided_regex": "a+completion"}),
        (
            "/v1/responses",
            503,
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"const": "response"}}}},
        ),
        ("/api/chat", 503, {"messages": [USER], "format": {"const": "Ollama"}, "stream": False}),
        ("/generate", 429, {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "a+TGI"}}}),
    ],
)
async def test_a_grammar_whose_check_was_killed_may_be_sent_again(
    sites: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, path: str, status: int, fields: dict[str, Any]
) -> None:
    """TGI's status for what the server cannot do now is 429."""
    site = sites()
    ended = True

    async def ask(process: WorkerProcess, line: bytes, seconds: float) -> bytes:
        if ended:
            process.kill()
        return await answer(process, line, seconds)

    answer = WorkerProcess.ask
    monkeypatch.setattr(WorkerProcess, "ask", ask)
    body = fields if path == "/generate" else {"model": NAME, **fields}
    response = await site.http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.headers["retry-after"] == "1" and "send it again later" in response.text
    ended = False
    site.says("1")
    assert (await site.http.post(path, json=body)).status_code == 200
