"""/v1/chat/completions, whole answers, and the prompts that messages become."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.frontend.conftest import NAME, Site
from tests.frontend.scripted import logprob_of

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
TEXT_A, TEXT_B = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
EMPTY = {"refusal": None, "annotations": [], "tool_calls": [], "audio": None, "function_call": None, "type": "text"}


def rendered(site: Site) -> str:
    """The prompt of the last request."""
    return site.tokenizer.decode(site.engine.requests[-1].prompt_ids, skip_special_tokens=False)


async def test_answer_has_the_shape_clients_know(site: Site) -> None:
    site.says("hello world")
    site.engine.cached_tokens = 3
    answer = await site.post(PATH, messages=USER)
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 0
    prompt_tokens = len(site.engine.requests[0].prompt_ids)
    completion_tokens = len(site.tokenizer.encode("hello world")) + 1
    assert answer == {
        "object": "chat.completion",
        "model": NAME,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"messages": USER}, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        ({"messages": USER, "add_generation_prompt": False}, "<|im_start|>user\nhello<|im_end|>\n"),
        (
            {"messages": [{"role": "developer", "content": "be brief"}], "add_generation_prompt": False},
            "<|im_start|>system\nbe brief<|im_end|>\n",
        ),
        (
            {
                "messages": [{"role": "user", "content": [TEXT_A, TEXT_B]}],
                "add_generation_prompt": False,
            },
            "<|im_start|>user\na\nb<|im_end|>\n",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": "Sure, "}], "continue_final_message": True},
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nSure, ",
        ),
        (
            {
                "messages": [{**EMPTY, "role": "assistant", "content": "x"}],
                "add_generation_prompt": False,
            },
            "<|im_start|>assistant\nx<|im_end|>\n",
        ),
        (
            {"messages": [{"role": "user", "content": "a\x00b"}], "add_generation_prompt": False},
            "<|im_start|>user\na\x00b<|im_end|>\n",
        ),
    ],
)
async def test_messages_become_the_templates_prompt(site: Site, fields: dict[str, Any], prompt: str) -> None:
    await site.post(PATH, **fields)
    assert rendered(site) == prompt


async def test_length_is_the_rest_of_the_context(site: Site) -> None:
    answer = await site.post(PATH, messages=USER)
    assert answer["usage"]["total_tokens"] == site.engine.info.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_length_under_both_names(site: Site, name: str) -> None:
    answer = await site.post(PATH, messages=USER, **{name: 3})
    assert answer["usage"]["completion_tokens"] == 3


async def test_neutral_values_of_unsupported_parameters(site: Site) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "service_tier": "auto",
        "logit_bias": None,
        "metadata": {"a": "b"},
        "user": "someone",
    }
    await site.post(PATH, messages=USER, **neutral)


async def test_logprobs(site: Site) -> None:
    ids = site.says("hé", ends=False)
    answer = await site.post(PATH, messages=USER, logprobs=True, top_logprobs=2, max_tokens=len(ids))
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "hé".encode()
    for token_id, entry in zip(ids, content, strict=True):
        token = site.tokenizer.token(token_id)
        assert (entry["token"], entry["logprob"]) == (token, logprob_of(token_id))
        assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
            (token, logprob_of(token_id)),
            (site.tokenizer.token(token_id + 1), logprob_of(token_id) - 1),
        ]
    plain = await site.post(PATH, messages=USER, logprobs=True, max_tokens=1)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_are_beside_the_choices(site: Site) -> None:
    answer = await site.post(PATH, messages=USER, prompt_logprobs=0, max_tokens=1)
    prompt_ids = site.engine.requests[0].prompt_ids
    assert answer["prompt_logprobs"][0] is None
    assert [next(iter(row)) for row in answer["prompt_logprobs"][1:]] == [str(token_id) for token_id in prompt_ids[1:]]


async def test_several_choices_with_stop_strings(make_site: Callable[..., Site]) -> None:
    site = make_site()
    texts = ["one stop", "another stop", "stop"]
    site.engine.output = lambda request, choice: site.tokenizer.encode(texts[choice])
    answer = await site.post(PATH, messages=USER, n=3, stop=["stop"])
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["one ", "another ", ""]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    kept = {choice: keep for _, choice, _, keep in site.engine.finished}
    assert (
        answer["usage"]["completion_tokens"] == sum(kept.values()) == sum(len(site.tokenizer.encode(t)) for t in texts)
    )


async def test_a_model_without_a_template_says_so(make_site: Callable[..., Site]) -> None:
    site = make_site(template=False)
    response = await site.http.post(PATH, json={"messages": USER})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_chat_template"


async def test_variables_of_a_template_may_have_any_name(site: Site) -> None:
    await site.post(
        PATH, messages=USER, chat_template_kwargs={"self": 1, "enable_thinking": False, "nested": {"a": [1]}}
    )
    assert rendered(site).endswith("assistant\n")
