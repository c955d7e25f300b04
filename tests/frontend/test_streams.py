"""Streams by the letter: what every chunk has, which comes first and last, and that nothing is lost between."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.messages import EndsEngines, EngineError, QueueFull, RequestRejected
from tests.frontend.conftest import NAME, Site, parse_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello"}
BOTH = pytest.mark.parametrize(("path", "ask"), [(CHAT, USER), (COMPLETIONS, PROMPT)])


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (50,)])
@pytest.mark.parametrize("usage", [None, False, True])
async def test_chat(site: Site, cuts: tuple[int, ...], usage: bool | None) -> None:
    text = "Größe 你好 👍🏽!"
    ids = site.says(text, cuts=cuts)
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    events = await site.events(CHAT, **USER, **options)
    if usage:
        last = events.pop()
        assert last["choices"] == []
        prompt_tokens = len(site.engine.requests[0].prompt_ids)
        assert last["usage"]["prompt_tokens"] == prompt_tokens
        assert last["usage"]["completion_tokens"] == len(ids) + 1
        assert last["usage"]["total_tokens"] == prompt_tokens + len(ids) + 1
    for event in events:
        (choice,) = event["choices"]
        fixed = {
            "object": "chat.completion.chunk",
            "model": NAME,
            "id": events[0]["id"],
            "created": events[0]["created"],
        }
        assert fixed.items() <= event.items()
        assert event.keys() - fixed.keys() == ({"choices", "usage"} if usage else {"choices"})
        assert event.get("usage") is None
        assert choice.keys() == {"index", "delta", "logprobs", "finish_reason"}
        assert choice["logprobs"] is None
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    for event in events[1:-1]:
        assert event["choices"][0]["delta"].keys() == {"content"}
        assert event["choices"][0]["finish_reason"] is None
    assert text_of(events) == text


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (50,)])
@pytest.mark.parametrize("usage", [False, True])
async def test_completions(site: Site, cuts: tuple[int, ...], usage: bool) -> None:
    text = "Größe 你好 👍🏽!"
    ids = site.says(text, cuts=cuts)
    events = await site.events(COMPLETIONS, **PROMPT, max_tokens=60, stream_options={"include_usage": usage})
    if usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(ids) + 1
    for event in events:
        (choice,) = event["choices"]
        assert event["object"] == "text_completion"
        assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert text_of(events) == text


@BOTH
async def test_usage_with_every_chunk(site: Site, path: str, ask: dict[str, Any]) -> None:
    ids = site.says("hello world")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await site.events(path, **ask, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids) + 1


@BOTH
async def test_a_stop_string_across_chunks_is_never_shown(site: Site, path: str, ask: dict[str, Any]) -> None:
    site.says("hello st stop world", cuts=(1,))
    events = await site.events(path, **ask, stop=["stop"])
    assert text_of(events) == "hello st "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(site.engine.finished) == 1


@BOTH
async def test_choices_interleave(make_site: Callable[..., Site], path: str, ask: dict[str, Any]) -> None:
    site = make_site()
    texts = ["one", "another one", ""]
    eos = list(site.engine.info.eos_token_ids)
    site.engine.output = lambda request, choice: [*site.tokenizer.encode(texts[choice]), *eos]
    events = await site.events(path, **ask, n=3)
    assert [text_of(events, index) for index in range(3)] == texts
    reasons = [(c["index"], c["finish_reason"]) for event in events for c in event["choices"] if c["finish_reason"]]
    assert sorted(reasons) == [(0, "stop"), (1, "stop"), (2, "stop")]
    if path == CHAT:
        roles = [c["index"] for event in events for c in event["choices"] if "role" in c["delta"]]
        assert roles == [0, 1, 2]


async def test_batched_prompts(site: Site) -> None:
    site.engine.output = lambda request, choice: [request.prompt_ids[0]]
    events = await site.events(COMPLETIONS, prompt=[[60], [61], [62]], max_tokens=2)
    assert [text_of(events, i) for i in range(3)] == [site.tokenizer.decode([60 + i] * 2) for i in range(3)]


async def test_chat_logprobs_come_with_their_tokens(site: Site) -> None:
    ids = site.says("hello wörld", cuts=(2, 1))
    events = await site.events(CHAT, **USER, logprobs=True, top_logprobs=1)
    shown = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in shown] == [
        site.tokenizer.token(i) for i in [*ids, site.engine.info.eos_token_ids[0]]
    ]
    assert text_of(events) == "hello wörld"


async def test_completion_logprobs_and_echo(site: Site) -> None:
    ids = site.says("wörld", cuts=(2, 1), ends=False)
    events = await site.events(COMPLETIONS, **PROMPT, echo=True, logprobs=1, max_tokens=len(ids))
    assert text_of(events) == "hello" + "wörld"
    shown = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    prompt_ids = site.tokenizer.encode("hello")
    assert [token for part in shown for token in part["tokens"]] == [
        site.tokenizer.token(i) for i in [*prompt_ids, *ids]
    ]
    offsets = [offset for part in shown for offset in part["text_offset"]]
    assert offsets == sorted(offsets)
    assert offsets[len(prompt_ids)] == len("hello")


async def test_only_the_prompt(site: Site) -> None:
    events = await site.events(COMPLETIONS, **PROMPT, echo=True, max_tokens=0, stream_options={"include_usage": True})
    assert text_of(events) == "hello"
    assert events[-1]["usage"]["completion_tokens"] == 0


@BOTH
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (RequestRejected("the prompt needs 9 blocks, the pool has 8"), 400, "request_rejected"),
        (EndsEngines("the engine ended twice: do not send it again"), 400, "request_rejected"),
        (QueueFull("1024 requests wait, which is the limit", 7), 429, "queue_full"),
        (EngineError("the engine has died"), 503, "engine_unavailable"),
        (ZeroDivisionError("a bug"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_before_the_first_token_has_a_status(
    site: Site, path: str, ask: dict[str, Any], refusal: Exception, status: int, code: str, stream: bool
) -> None:
    site.engine.refusal = refusal
    response = await site.http.post(path, json={**ask, "stream": stream})
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert ("a bug" in error["message"]) is False
    assert ("retry-after" in response.headers) is (status in (429, 503))
    final = status == 500 or isinstance(refusal, EndsEngines)
    assert response.headers.get("x-should-retry") == ("false" if final else None)
    if status in (429, 503):
        assert 0 < int(response.headers["retry-after"]) <= 120


@BOTH
@pytest.mark.parametrize(
    ("attribute", "code"), [("dies_after", "engine_unavailable"), ("row_error_after", "generation_failed")]
)
async def test_what_fails_later_is_an_event(
    site: Site, path: str, ask: dict[str, Any], attribute: str, code: str
) -> None:
    site.says("hello world")
    setattr(site.engine, attribute, 2)
    response = await site.http.post(path, json={**ask, "stream": True})
    assert response.status_code == 200
    *events, failure = parse_events(response.content)
    assert failure.keys() == {"error"}
    assert failure["error"].keys() == {"message", "type", "param", "code"}
    assert failure["error"]["code"] == code
    assert text_of(events) == site.tokenizer.decode(site.tokenizer.encode("hello world")[:2])
    assert all(event["choices"][0]["finish_reason"] is None for event in events)
    whole = await site.http.post(path, json=ask)
    assert whole.status_code == (503 if code == "engine_unavailable" else 500)
    setattr(site.engine, attribute, None)
    assert (await site.post(path, **ask))["choices"][0]["finish_reason"] == "stop"


async def test_one_failing_prompt_aborts_the_others(site: Site) -> None:
    site.engine.row_error_after = 1
    response = await site.http.post(COMPLETIONS, json={"prompt": [[60], [61]], "max_tokens": 9})
    assert response.status_code == 500
    assert site.engine.running == 0
    assert sorted(site.engine.aborted) == sorted(request.request_id for request in site.engine.requests)


@pytest.mark.parametrize(
    ("options", "gathered"),
    [
        ({}, 32),
        ({"stop": ["no such text"]}, 1),  # the engine would compute up to 31 tokens too many
        ({"stream": True}, 1),
    ],
)
@BOTH
async def test_tokens_are_taken_one_by_one_where_it_matters(
    site: Site, path: str, ask: dict[str, Any], options: dict[str, Any], gathered: int
) -> None:
    site.says("Hello there")
    answer = await site.http.post(path, json={"model": NAME, **ask, **options})
    assert answer.status_code == 200
    assert site.engine.gathered == [gathered]


async def test_a_route_with_parameters_in_its_path_says_when_to_come_again(site: Site) -> None:
    site.engine.refusal = EngineError("the engine has died")
    for path, ask in ((f"/v2/models/{NAME}/generate", {"text_input": "a"}), ("/v1/completions", {"prompt": "a"})):
        response = await site.http.post(path, json=ask)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
