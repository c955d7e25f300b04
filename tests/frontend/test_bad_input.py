"""Every route against bad input: a 4xx with the four keys, naming the parameter, and a healthy server after it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend import RequestLimits
from tests.frontend.conftest import NAME, Site

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": NAME, "prompt": "hello", "max_tokens": 2},
    CHAT: {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    TOKENIZE: {"model": NAME, "prompt": "hello"},
    DETOKENIZE: {"model": NAME, "tokens": [60, 61]},
}
HUGE = 10**30
VOCAB = 271  # of the scripted engine
LONG = "x" * 20000
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# Bodies that are no JSON object of strict JSON, whatever the route.
MALFORMED = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b"{'model': 'tiny'}",
    b'{"model": "tiny"} trailing',
    b'{"model": "tiny",}',
    b'{"model": NaN}',
    b'{"model": Infinity}',
    b'{"model": -Infinity}',
    b'{"model": 01}',
    b'{"model": "\x00"}',
    b'{"model": "\xff\xfe"}',
    b'{"model": "\xed\xa0\x80"}',
    b'{"model": "\\ud800"}',
    b'{"model": "\\udc00 and more text"}',
    b"\xef\xbb\xbf{}",
    b"\x00\x00\x00",
    b"[" * 100_000,
    b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"tools": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
]

# Parameters of both generating routes: (parameters, the parameter the error must name).
SHARED: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"),
    ({"no_such_parameter": 1}, "no_such_parameter"),
    ({"no_such_parameter": None}, "no_such_parameter"),
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"no_such_option": True}}, "stream_options.no_such_option"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    *[({"n": n}, "n") for n in (0, -1, 33, HUGE, 1.5, "1", True, [1])],
    *[({"max_tokens": value}, "max_tokens") for value in (-1, 10_000, HUGE, 2.5, "5", True, {})],
    *[({"temperature": value}, "temperature") for value in (-0.1, -HUGE, "hot", True, [0.5])],
    *[({"top_p": value}, "top_p") for value in (-0.1, 1.1, HUGE, "1", False)],
    *[({"min_p": value}, "min_p") for value in (-0.1, 1.1, HUGE, "1")],
    *[({"top_n_sigma": value}, "top_n_sigma") for value in (-1.1, -HUGE, "1", True)],
    *[({"top_k": value}, "top_k") for value in (-2, HUGE, -HUGE, 2.5, "9", True)],
    *[({"presence_penalty": value}, "presence_penalty") for value in (-2.1, 2.1, HUGE, "1", True)],
    *[({"frequency_penalty": value}, "frequency_penalty") for value in (-2.1, 2.1, -HUGE, "1", True)],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, HUGE, "1", True)],
    *[({"min_tokens": value}, "min_tokens") for value in (-1, 3, HUGE, 1.5, "1", True)],
    *[({"seed": value}, "seed") for value in (2**64, -(2**63) - 1, 10**4000, 1.5, "1", True)],
    *[({"priority": value}, "priority") for value in (11, -11, -(2**31) + 1, -HUGE, 1.5, "1", True)],
    *[({"timeout": value}, "timeout") for value in (0, -1, 86401, 1e300, "5", True)],
    *[({"first_token_timeout": value}, "first_token_timeout") for value in (0, -0.5, 10**9, "1", [1])],
    *[({"prompt_logprobs": value}, "prompt_logprobs") for value in (-1, 21, HUGE, "1", True)],
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    *[({"stop": value}, "stop") for value in ("", [""], ["a", ""], ["a"] * 17, "x" * 257, 5, True)],
    ({"stop": [5]}, "stop[0]"),
    ({"stop": ["a", None]}, "stop[1]"),
    *[({"stop_token_ids": value}, "stop_token_ids") for value in ([VOCAB], [-1], [HUGE], 5, "1", [1] * 300)],
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    *[({"logit_bias": value}, "logit_bias") for value in ({str(VOCAB): 1}, {"-1": 1}, {"a": 1}, {"": 1}, {"1.5": 1})],
    *[({"logit_bias": value}, "logit_bias") for value in ({"1": 101}, {"1": -HUGE}, {"9" * 5000: 1}, [1], "x")],
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[...]"),
    *[({"cache_salt": value}, "cache_salt") for value in ("", "x" * 257, 5)],
    *[({"ignore_eos": value}, "ignore_eos") for value in (1, "true")],
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"user": 5}, "user"),
    ({"metadata": {"a": 5}}, "metadata[...]"),
]
ONLY_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    *[({"prompt": value}, "prompt") for value in (None, "", [], [[]], [""], ["a", ""], 5, True, {}, 1.5)],
    *[
        ({"prompt": value}, "prompt")
        for value in ([VOCAB], [-1], [HUGE], [[60], [VOCAB]], [60, "a"], ["a", [60]], [60, [60]])
    ],
    ({"prompt": [60, None]}, "prompt[1]"),
    ({"prompt": [60.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [["a"]]}, "prompt[0][0]"),
    ({"prompt": [[60, True]]}, "prompt[0][1]"),
    ({"prompt": [[[60]]]}, "prompt[0][0]"),
    ({"prompt": [60] * 64}, "prompt"),
    ({"prompt": [60] * 100_000}, "prompt"),
    ({"prompt": LONG}, "prompt"),
    ({"prompt": ["hello", "y" * 200]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 32}, "n"),
    ({"prompt": [60] * 63, "max_tokens": 2}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True, "max_tokens": 0, "prompt": [60] * 64}, "prompt"),
    *[({"logprobs": value}, "logprobs") for value in (-1, 21, HUGE, True, False, "1", 1.5)],
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
    *[({"echo": value}, "echo") for value in (1, "true")],
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": []}, "messages"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
]
ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    *[({"messages": value}, "messages") for value in (None, [], "hello", {}, 5)],
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x", "type": "image"}]}, "messages[0].type"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]},
        "messages[0].tool_calls[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": " " * ((1 << 20) + 1)}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ({"messages": [{"role": "user", "content": "y" * 200}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": None}], "continue_final_message": True}, "messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    *[({"logprobs": value}, "logprobs") for value in (1, "true", 0)],
    *[({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-1, 21, HUGE, True, "1")],
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    *[
        ({"max_tokens": None, "max_completion_tokens": value}, "max_completion_tokens")
        for value in (0, -1, 999, HUGE, "1")
    ],
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
    *[
        ({"tools": [{"function": {"name": name}}]}, "tools[0].function.name")
        for name in (None, 5, "", "a b", "x" * 129)
    ],
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools[0].function.parameters.type"),
    ({"tools": [{"function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"function": {"name": "f", "description": "x" * (256 << 10)}}]}, "tools"),
    *[({"tools": [TOOL], "tool_choice": value}, "tool_choice") for value in ("any", 5, {}, {"type": "function"})],
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"prediction": {}}, "prediction.type"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": {"type": "words", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0]"),
    ({"prompt": "x"}, "prompt"),
]
ONLY_TOKENIZE: list[tuple[dict[str, Any], str]] = [
    *[({"prompt": value}, "prompt") for value in (None, "", 5, True, ["a"], LONG)],
    ({"prompt": "x", "messages": []}, "prompt"),
    ({"prompt": None, "messages": []}, "messages"),
    ({"prompt": None, "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"chat_template": "x", "prompt": None, "messages": []}, "chat_template"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"no_such_parameter": 1}, "no_such_parameter"),
    ({"model": 5}, "model"),
]
ONLY_DETOKENIZE: list[tuple[dict[str, Any], str]] = [
    *[({"tokens": value}, "tokens") for value in (None, 5, "x", {})],
    *[
        ({"tokens": value}, "tokens[1]")
        for value in ([60, VOCAB], [60, -1], [60, HUGE], [60, True], [60, "x"], [60, 1.0])
    ],
    ({"no_such_parameter": 1}, "no_such_parameter"),
]
CASES = [
    *[(COMPLETIONS, fields, param) for fields, param in [*SHARED, *ONLY_COMPLETIONS]],
    *[(CHAT, fields, param) for fields, param in [*SHARED, *ONLY_CHAT]],
    *[(TOKENIZE, fields, param) for fields, param in ONLY_TOKENIZE],
    *[(DETOKENIZE, fields, param) for fields, param in ONLY_DETOKENIZE],
]


async def refused(site: Site, path: str, body: bytes, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused, by a server that goes on serving."""
    response = await site.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    answer = response.json()
    assert answer.keys() == {"error"}
    error: dict[str, Any] = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 500
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    assert site.engine.requests == []
    good = await site.http.post(path, json=GOOD[path])
    assert good.status_code == 200, good.text
    return error


@pytest.mark.parametrize(("path", "fields", "param"), CASES, ids=lambda value: str(value)[:60])
async def test_a_bad_parameter_is_named(site: Site, path: str, fields: dict[str, Any], param: str) -> None:
    error = await refused(site, path, json.dumps({**GOOD[path], **fields}).encode())
    assert error["param"] == param
    assert param.split("[")[0].split(".")[-1] in error["message"] or "content" in param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b"[]", "the body is an array; it must be an object"),
        (b'{"prompt": "x", "temperature": "1"}', "temperature is a string; it must be a number"),
        (b'{"prompt": "x", "max_tokens": 2.5}', "max_tokens is a number; it must be an integer"),
        (b'{"prompt": true}', "prompt is true or false; it must be a string or an array"),
        (b'{"prompt": null}', "prompt is null; it must be a string or an array"),
        (b'{"prompt": "x", "n": 1' + b"0" * 5000 + b"}", "n has too many digits; send a smaller number"),
    ],
)
async def test_a_wrong_type_is_told_in_a_clients_words(site: Site, body: bytes, message: str) -> None:
    assert (await refused(site, COMPLETIONS, body))["message"] == message


async def test_a_wrong_token_is_told_with_its_place(site: Site) -> None:
    error = await refused(site, DETOKENIZE, b'{"tokens": [60, 271]}')
    assert error["message"] == "tokens[1] is 271; ids of 'tiny' are 0 to 270"


async def test_errors_of_unknown_paths_have_the_form_of_their_api(site: Site) -> None:
    """So that a client shows the message, and not that it cannot read the answer."""
    ollama = (await site.http.post("/api/blobs/sha256:0", json={})).json()
    assert ollama["error"].startswith("there is no route /api/blobs/sha256:0")
    version = {"anthropic-version": "2023-06-01"}
    anthropic = (await site.http.post("/v1/messages/batches", json={}, headers=version)).json()
    assert anthropic["type"] == "error" and anthropic["error"]["type"] == "not_found_error"
    kserve = (await site.http.get("/v2/repository")).json()
    assert kserve["error"].startswith("there is no route /v2/repository")
    openai = (await site.http.get("/v1/assistants")).json()
    assert openai["error"]["code"] == "not_found"
    wrong_method = (await site.http.get("/api/chat")).json()
    assert wrong_method["error"] == "/api/chat does not take GET; send POST"


@pytest.mark.parametrize("path", ["create", "copy", "push"])
async def test_ollamas_routes_that_are_refused_say_what_to_do(site: Site, path: str) -> None:
    refused = await site.http.post(f"/api/{path}", json={"model": "a"})
    assert refused.status_code == 403 and refused.json()["error"].startswith("this server ")


async def test_a_path_that_is_not_here_is_told_what_is(site: Site) -> None:
    there = await site.http.post("/v1/embedding", json={"input": "x"})
    assert there.status_code == 404
    message = there.json()["error"]["message"]
    assert message.startswith("there is no route /v1/embedding; did you mean /v1/embeddings")
    assert message.endswith("? GET /openapi.json lists all routes")
    base = (await site.http.get("/v1")).json()["error"]["message"]  # what clients have as their base URL
    assert base.startswith("there is no route /v1; did you mean /v1/batches or /v1/chat/completions or ")
    far = await site.http.get("/zzzzzzzz")
    assert far.json()["error"]["message"] == "there is no route /zzzzzzzz; GET /openapi.json lists all routes"
    assert (await site.http.get("/openapi.json")).status_code == 200
    got = await site.http.get("/v1/completions")
    assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert got.json()["error"]["message"] == "/v1/completions does not take GET; send POST"


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:40]))
async def test_a_malformed_body(site: Site, path: str, body: bytes) -> None:
    await refused(site, path, body)


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "n", "max_tokens", "logit_bias"])
@pytest.mark.parametrize("literal", ["1e400", "-1e400", "1" + "0" * 400, "NaN", "Infinity"])
async def test_numbers_beyond_every_range(site: Site, name: str, literal: str) -> None:
    value = '{"5": ' + literal + "}" if name == "logit_bias" else literal
    body = '{"prompt": "x", "' + name + '": ' + value + "}"
    error = await refused(site, COMPLETIONS, body.encode())
    if literal[-1].isdigit():
        assert error["param"] is not None and error["param"].startswith(name)
    else:
        assert "JSON" in error["message"]


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("name", ["other", "", "tiny\x00", "../tiny", "t" * 5000])
async def test_a_model_that_is_not_served(site: Site, path: str, name: str) -> None:
    body = json.dumps({**GOOD[path], "model": name}).encode()
    error = await refused(site, path, body, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("missing", ["prompt", "messages", "tokens"])
async def test_a_parameter_that_must_be_there(site: Site, path: str, missing: str) -> None:
    if missing in GOOD[path]:
        fields = {key: value for key, value in GOOD[path].items() if key != missing}
        error = await refused(site, path, json.dumps(fields).encode())
        assert (error["param"], error["code"]) == (missing, "missing_parameter")


@pytest.mark.parametrize("path", GOOD)
async def test_a_body_beyond_the_limit(make_site: Callable[..., Site], path: str) -> None:
    site = make_site(limits=RequestLimits(max_body_bytes=1000))
    error = await refused(site, path, b" " * 1001, 413)
    assert "1000 bytes" in error["message"] and "--max-body-size" in error["message"]

    async def unannounced():  # type: ignore[no-untyped-def]
        for _ in range(100):
            yield b" " * 100

    response = await site.http.post(path, content=unannounced(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "headers",
    [
        {"content-encoding": "gzip"},
        {"content-encoding": "br"},
        {"content-type": "text/plain"},
        {"content-type": "x" * 500},
    ],
)
async def test_encodings_and_types_that_are_not_taken(site: Site, path: str, headers: dict[str, str]) -> None:
    response = await site.http.post(path, content=json.dumps(GOOD[path]).encode(), headers=headers)
    assert response.status_code == 415
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert (await site.http.post(path, json=GOOD[path])).status_code == 200


@pytest.mark.parametrize("length", [b"-1", b"1e9", b"99999999999999999999999", b"x"])
async def test_a_content_length_that_is_none(site: Site, length: bytes) -> None:
    request = site.http.build_request("POST", COMPLETIONS, content=b"{}")
    request.headers["content-length"] = length.decode()
    response = await site.http.send(request)
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("temprature", "did you mean temperature?"),
        ("max_token", "did you mean max_tokens?"),
        ("function", "leave it out"),  # functions is not supported
        ("no_such_parameter", "leave it out"),
    ],
)
async def test_an_unknown_parameter_is_answered_with_the_nearest_one(site: Site, name: str, remedy: str) -> None:
    answer = await site.http.post(CHAT, json={**GOOD[CHAT], name: 1})
    assert answer.json()["error"]["message"] == f"unknown parameter '{name}'; {remedy}"
