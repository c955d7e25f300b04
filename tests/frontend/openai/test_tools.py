"""Tools and reasoning of /v1/chat/completions: prompts, streams and whole answers, token by token."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from penstock.frontend import RequestLimits
from penstock.messages import Grammar, Thinking
from penstock.text import Tokenizer
from tests.frontend.conftest import KIMI, Site

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
TEXT = '<think>\nHm, 🌧.\n</think>\n\nI look.\n<tool_call>\n{"name": "now", "arguments": {"a": "Köln 🌧"}}\n</tool_call>'
MESSAGE = {"content": "I look.", "reasoning": "Hm, 🌧.", "calls": [("now", '{"a": "Köln 🌧"}')]}


def message_of(events: list[Any]) -> dict[str, Any]:
    """What a stream's deltas say, as clients add them up."""
    content, reasoning, calls = "", "", []
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content", "")
            assert delta.get("reasoning_content") == delta.get("reasoning")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls) and call["type"] == "function"
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    return {"content": content, "reasoning": reasoning, "calls": [tuple(call) for call in calls]}


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
async def test_streams_however_tokens_arrive(sites: Callable[..., Site], cut: int) -> None:
    site = sites()
    ids = site.says(TEXT, cuts=(cut,))
    events = await site.events(PATH, messages=USER, tools=[TOOL], stream_options={"include_usage": True})
    assert message_of(events) == MESSAGE
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(event["choices"][0]["logprobs"] is None for event in events[:-1])
    usage = events[-1]["usage"]
    thoughts = len(site.tokenizer.encode("<think>\nHm, 🌧.\n</think>"))
    predicted = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert usage["completion_tokens_details"] == {**predicted, "reasoning_tokens": thoughts}
    assert usage["completion_tokens"] == len(ids) + 1


async def test_a_whole_answer(sites: Callable[..., Site]) -> None:
    site = sites()
    site.says(TEXT)
    answer = await site.post(PATH, messages=USER, tools=[TOOL])
    (choice,) = answer["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "now", "arguments": '{"a": "Köln 🌧"}'}}
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "reasoning_content": "Hm, 🌧.",
        "reasoning": "Hm, 🌧.",
    }
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 26


async def test_a_client_that_reads_only_content_sees_no_tag(sites: Callable[..., Site]) -> None:
    """Without tools, too; a call is then text."""
    site = sites()
    site.says("<think>\nHm.\n</think>\n\nSo: <tool_call>.")
    answer = await site.post(PATH, messages=USER)
    assert answer["choices"][0]["message"]["content"] == "So: <tool_call>."
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = await site.events(PATH, messages=USER)
    assert message_of(events) == {"content": "So: <tool_call>.", "reasoning": "Hm.", "calls": []}


async def test_reasoning_that_is_cut_short(sites: Callable[..., Site]) -> None:
    site = sites()
    site.says("<think>\nOn and on", ends=False)
    answer = await site.post(PATH, messages=USER, max_tokens=12)
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["message"]["reasoning_content"] == "On a"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12


async def test_several_choices_are_read_apart(sites: Callable[..., Site]) -> None:
    site = sites()
    eos = site.engine.info.eos_token_ids[0]
    texts = [TEXT, "plain", "<think>a</think>b"]
    site.engine.output = lambda request, choice: [*site.tokenizer.encode(texts[choice]), eos]
    site.engine.cuts = (5,)
    answer = await site.post(PATH, messages=USER, tools=[TOOL], n=3)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["I look.", "plain", "b"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop", "stop"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 26 + len("<think>a</think>")


async def test_markers_that_are_special_tokens(sites: Callable[..., Site]) -> None:
    site = sites("kimi-k2", "none")
    begin, call, argument, end = KIMI
    text = f'ok{begin}{call}functions.now:0{argument}{{"a": "b"}}{end}<|tool_calls_section_end|><|pad|>'
    site.says(text)
    (choice,) = (await site.post(PATH, messages=USER, tools=[TOOL]))["choices"]
    assert choice["message"]["content"] == "ok"
    assert choice["message"]["tool_calls"] == [
        {"id": "functions.now:0", "type": "function", "function": {"name": "now", "arguments": '{"a": "b"}'}}
    ]
    (choice,) = (await site.post(PATH, messages=USER))["choices"]
    assert choice["message"]["content"] == 'okfunctions.now:0{"a": "b"}'
    site = sites("kimi-k2", "think")
    site.says(f"<think>a</think>{text}")
    (choice,) = (await site.post(PATH, messages=USER))["choices"]
    assert choice["message"]["content"] == 'okfunctions.now:0{"a": "b"}'


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), ({"type": "function", "function": {"name": "now"}}, "stop")],
)
async def test_finish_reasons_and_grammars(sites: Callable[..., Site], choice: Any, reason: str) -> None:
    site = sites()
    site.says(TEXT)
    answer = await site.post(PATH, messages=USER, tools=[TOOL], tool_choice=choice)
    assert answer["choices"][0]["finish_reason"] == reason
    grammar = site.engine.requests[-1].grammar
    assert grammar is not None and grammar.kind == "tools"
    assert grammar.trigger == ("<tool_call>" if choice == "auto" else "")
    site.says('<tool_call>{"name": "now", "arguments": {"a": "bcdefgh"}}', ends=False)
    answer = await site.post(PATH, messages=USER, tools=[TOOL], tool_choice=choice, max_tokens=50)
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_budgets_of_thinking(sites: Callable[..., Site], byte_tokenizer: Tokenizer) -> None:
    site = sites()

    async def asked(on: Site = site, **fields: Any) -> Grammar:
        on.says("ok")
        await on.post(PATH, messages=USER, **fields)
        grammar = on.engine.requests[-1].grammar
        assert grammar is not None
        return grammar

    thinking = Thinking(7, "<think>", "</think>")
    assert await asked(thinking_budget=7) == Grammar("any", "", thinking=thinking)
    assert await asked(thinking_token_budget=7) == Grammar("any", "", thinking=thinking)
    held = await asked(thinking_budget=7, tools=[TOOL])
    assert (held.kind, held.trigger, held.thinking) == ("tools", "<tool_call>", thinking)
    begun = [*USER, {"role": "assistant", "content": "<think>\n"}]
    opened = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    regex = {"structured_outputs": {"regex": "a+"}}
    site.says("Hm.</think>aa")
    await site.post(PATH, **opened, **regex, thinking_budget=0)
    expected = Grammar("regex", "a+", "</think>", Thinking(0, "<think>", "</think>", opened=True))
    assert site.engine.requests[-1].grammar == expected
    assert (await asked(thinking_budget=7, **regex)).thinking is None  # the answer begins with the first token
    for choice, answers in (("auto", 2), ("required", 1)):
        thinking = (
            await asked(sites("harmony", "harmony"), thinking_budget=7, tools=[TOOL], tool_choice=choice)
        ).thinking
        assert thinking is not None and len(thinking.answers) == answers
    for fields, words in (
        ({"thinking_budget": -2}, "0 or more"),
        ({"thinking_budget": 1, "thinking_token_budget": 2}, "differ"),
        ({"thinking_budget": 10**30}, "2147483647"),
    ):
        assert words in (await refusal(site, **fields))["message"]
    error = await refusal(sites(reasoning="none"), thinking_budget=5)
    assert error["param"] == "thinking_budget" and "--reasoning-format" in error["message"]


async def test_a_servers_budget_is_a_default_and_a_limit(sites: Callable[..., Site]) -> None:
    site = sites(budget=20)
    site.says("ok")
    for fields, budget in (({}, 20), ({"thinking_budget": 3}, 3), ({"thinking_budget": -1}, 20)):
        await site.post(PATH, messages=USER, **fields)
        grammar = site.engine.requests[-1].grammar
        assert grammar is not None and grammar.thinking is not None and grammar.thinking.budget == budget
    assert "limit is 20" in (await refusal(site, thinking_token_budget=21))["message"]


async def test_no_tools_no_grammar(sites: Callable[..., Site]) -> None:
    site = sites()
    site.says(TEXT)
    for fields in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        answer = await site.post(PATH, messages=USER, **fields)
        assert "tool_calls" not in answer["choices"][0]["message"]
        assert site.engine.requests[-1].grammar is None
        assert "now" not in site.tokenizer.decode(site.engine.requests[-1].prompt_ids)


async def test_prompts(sites: Callable[..., Site]) -> None:
    site = sites()
    site.says("ok")

    async def prompt(**fields: Any) -> str:
        await site.post(PATH, **fields)
        return site.tokenizer.decode(site.engine.requests[-1].prompt_ids, skip_special_tokens=False)

    assert (await prompt(messages=USER, tools=[TOOL])).startswith(json.dumps(TOOL))
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a":"é"}'}, "index": 0}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12:00"}]}
    history = await prompt(messages=[*USER, {"role": "assistant", "tool_calls": [call]}, result], tools=[TOOL])
    assert '<tool_call>{"name": "now", "arguments": {"a": "é"}}</tool_call>' in history
    assert history.endswith("<|im_start|>tool\n12:00<|im_end|>\n<|im_start|>assistant\n")
    assert (await prompt(messages=USER, reasoning_effort="high")).endswith("assistant\nhigh")
    assert "<think>\n\n</think>" in await prompt(messages=USER, reasoning_effort="none")
    forced = await prompt(messages=USER, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert "<think>" not in forced
    counted = await site.http.post("/tokenize", json={"messages": USER, "tools": [TOOL]})
    await prompt(messages=USER, tools=[TOOL])
    assert tuple(counted.json()["tokens"]) == site.engine.requests[-1].prompt_ids


async def test_logprobs_are_those_of_all_tokens(sites: Callable[..., Site]) -> None:
    site = sites()
    ids = site.says(TEXT, cuts=(4,))
    tokens = [site.tokenizer.token(token_id) for token_id in [*ids, site.engine.info.eos_token_ids[0]]]
    answer = await site.post(PATH, messages=USER, tools=[TOOL], logprobs=True)
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == tokens
    events = await site.events(PATH, messages=USER, tools=[TOOL], logprobs=True)
    entries = [event["choices"][0]["logprobs"] for event in events]
    assert [entry["token"] for logprobs in entries if logprobs for entry in logprobs["content"]] == tokens
    assert message_of(events) == MESSAGE


async def test_too_many_calls_end_the_answer_with_an_error(sites: Callable[..., Site]) -> None:
    site = sites(limits=RequestLimits(max_tool_calls=2, max_argument_chars=40))
    site.says('<tool_call>{"name": "now", "arguments": {}}</tool_call>' * 3)
    response = await site.http.post(PATH, json={"messages": USER, "tools": [TOOL]})
    assert response.status_code == 500
    assert "more than 2 tool calls, which is the limit" in response.json()["error"]["message"]
    events = await site.events(PATH, messages=USER, tools=[TOOL])
    assert events[-1]["error"]["code"] == "tool_call_too_large"
    site.says('<tool_call>{"name": "now", "arguments": {"a": "' + "x" * 60)
    response = await site.http.post(PATH, json={"messages": USER, "tools": [TOOL]})
    assert "more than 40 characters" in response.json()["error"]["message"]
    site.says("fine")
    assert (await site.post(PATH, messages=USER))["choices"][0]["message"]["content"] == "fine"


async def refusal(site: Site, **fields: Any) -> Mapping[str, Any]:
    response = await site.http.post(PATH, json={"messages": USER, **fields})
    assert response.status_code == 400, response.text
    error: Mapping[str, Any] = response.json()["error"]
    return error


async def test_refusals(sites: Callable[..., Site]) -> None:
    error = await refusal(sites("none"), tools=[TOOL])
    assert error["param"] == "tools" and "--tool-format none" in error["message"]
    site = sites()
    error = await refusal(site, tools=[TOOL], ignore_eos=True)
    assert error["param"] == "ignore_eos"
    bad = {"function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
    error = await refusal(site, tools=[TOOL, bad], tool_choice="required")
    assert error["param"] == "tools[1].function.parameters" and "'not'" in error["message"]
    error = await refusal(site, tools=[TOOL], structured_outputs={"regex": "a+"})
    assert error["param"] == "structured_outputs.regex" and "tools" in error["message"]
    site.says("fine")
    assert (await site.post(PATH, messages=USER, tools=[TOOL, bad]))["choices"][0]["message"]["content"] == "fine"


async def test_an_unclosed_stream_of_any_text_never_fails(sites: Callable[..., Site]) -> None:
    site = sites()
    for text in ("<tool_call>", "<think><tool_call>", '<tool_call>{"name": "now", "arguments": [', "<tool_call>{é"):
        site.says(text, ends=False)
        await site.events(PATH, messages=USER, tools=[TOOL], max_tokens=200)
