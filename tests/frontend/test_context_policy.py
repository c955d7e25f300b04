"""Chats that are too long for the model and lose their oldest turns."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.errors import ContextOverflow
from penstock.frontend.requests.context_policy import GROUP_PART, encode_newest, shorter
from penstock.text.prompts import Encoded
from tests.frontend.conftest import NAME, Site

Sites = Callable[..., Site]
SYSTEM = {"role": "system", "content": "be kind"}
messages = st.builds(
    lambda role, size: {"role": role, "content": "x" * size or None},
    st.sampled_from(["user", "user", "assistant", "tool", "system"]),
    st.integers(0, 30),
)


@given(st.lists(messages, max_size=20), st.integers(1, 50))
def test_parts_keep_system_prompts_and_whole_turns_and_the_last_one(chat: list[dict[str, Any]], quantum: int) -> None:
    """Cuts are the same in a longer conversation, but for the last one."""
    parts = shorter(chat, quantum)
    users = [place for place, each in enumerate(chat) if each["role"] == "user"]
    for part in parts:
        kept = [each for each in part if each["role"] != "system"]
        assert [each for each in part if each["role"] == "system"] == [
            each for each in chat if each["role"] == "system"
        ]
        assert kept == [each for each in chat if each["role"] != "system"][-len(kept) :]
        assert kept[0]["role"] == "user" and part[-1] is chat[-1]
        assert len(chat[users[-1] :]) <= len(part) < len(chat)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(set(sizes), reverse=True)
    more = shorter([*chat, {"role": "user", "content": "more"}], quantum)
    assert [len(chat) - len(part) for part in parts[:-1]] == [
        len(chat) + 1 - len(part) for part in more[: len(parts) - 1]
    ]


@given(st.lists(messages, max_size=20), st.integers(1, 200), st.integers(1, 20))
async def test_as_few_turns_go_as_are_too_many(chat: list[dict[str, Any]], context: int, wanted: int) -> None:
    def size(part: Any) -> int:
        return sum(len(each["content"] or "") for each in part)

    async def encode(part: Any) -> Encoded:
        if size(part) >= context:
            raise ContextOverflow("messages", size(part), context)
        return Encoded((0,) * size(part))

    fitting = [part for part in [chat, *shorter(chat, max(context // GROUP_PART, 1))] if size(part) + wanted <= context]
    if fitting:
        encoded, dropped = await encode_newest(chat, encode, context, wanted)
        assert (len(encoded.ids), dropped) == (size(fitting[0]), len(chat) - len(fitting[0]))
    elif size(chat) >= context:
        with pytest.raises(ContextOverflow):
            await encode_newest(chat, encode, context, wanted)
    else:
        assert (await encode_newest(chat, encode, context, wanted))[1] == 0, "the limit of the answer is refused later"


def conversation(turns: int) -> list[dict[str, str]]:
    said = [
        {"role": role, "content": f"{role} {i} {'hello ' * 3}"} for i in range(turns) for role in ("user", "assistant")
    ]
    return [SYSTEM, *said[:-1]]


async def test_a_chat_goes_on_without_its_oldest_turns_and_says_so(make_site: Sites) -> None:
    site = make_site(max_model_len=400, context_policy="drop-oldest")

    async def ask(turns: list[dict[str, str]], **fields: Any) -> Any:
        body = {"model": NAME, "messages": turns, "max_tokens": 8, **fields}
        return await site.http.post("/v1/chat/completions", json=body)

    dropped, prompts = [], []
    for turns in range(1, 48):
        chat = conversation(turns)
        answer = await ask(chat)
        assert answer.status_code == 200, answer.text
        missing = int(answer.headers.get("x-dropped-messages", "0"))
        assert answer.json()["usage"].get("dropped_messages", 0) == missing
        dropped.append(missing)
        prompts.append(site.engine.requests[-1].prompt_ids)
        assert (await ask([SYSTEM, *chat[1 + missing :]])).status_code == 200, (
            "what a client would have left out itself"
        )
        assert site.engine.requests[-1].prompt_ids == prompts[-1]
    assert dropped[0] == 0 < dropped[-1] and dropped == sorted(dropped)
    cuts = len(set(dropped)) - 1
    assert 2 <= cuts <= len([each for each in dropped if each]) / 2, "cuts are rare, so that the prefix stays cached"
    for before, after, *counts in zip(prompts, prompts[1:], dropped, dropped[1:], strict=False):
        if counts[0] == counts[1]:
            common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
            assert common >= len(before) - 8, "all but the marker of the answer"
    answer = await ask([SYSTEM, {"role": "user", "content": "hello " * 900}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_response_loses_turns_only_with_truncation(make_site: Sites) -> None:
    site = make_site(max_model_len=200)
    body = {"model": NAME, "input": conversation(24), "max_output_tokens": 8}
    answer = await site.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = await site.http.post("/v1/responses", json={**body, "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto" and int(answer.headers["x-dropped-messages"]) > 0
