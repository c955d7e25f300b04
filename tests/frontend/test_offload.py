"""What takes long is done beside the event loop, where every stream waits; and what is the same for all, once."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock.frontend.offload import FewAtOnce
from penstock.frontend.requests.grammar import MAX_WAITING
from penstock.messages import Grammar
from penstock.text import GrammarChecker
from penstock.text.prompts import PromptWorkers
from tests.frontend.conftest import Site
from tests.patience import PATIENCE, until

HERE = threading.main_thread()


def threads_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[threading.Thread]:
    """The threads that call a method of an object, from now on."""
    seen: list[threading.Thread] = []
    method = getattr(owner, name)

    def watched(*args: Any, **named: Any) -> Any:
        seen.append(threading.current_thread())
        return method(*args, **named)

    monkeypatch.setattr(owner, name, watched)
    return seen


@pytest.mark.parametrize("count", [2, 400])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_many_messages_without_text(site: Site, monkeypatch: pytest.MonkeyPatch, path: str, count: int) -> None:
    await site.http.post(path, json={"messages": [{"role": "user", "content": ""}]})  # finds what the template takes
    seen = threads_of(monkeypatch, site.tokenizer.chat_template, "render")
    await site.http.post(path, json={"messages": [{"role": "user", "content": ""}] * count})
    assert [thread is HERE for thread in seen] == [count == 2]


@pytest.mark.parametrize("count", [3, 9000])
async def test_many_tokens_to_text(site: Site, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen = threads_of(monkeypatch, site.tokenizer, "decode")
    await site.post("/detokenize", tokens=[60] * count)
    assert [thread is HERE for thread in seen] == [count == 3]


@pytest.mark.parametrize("k", [0, 20])
@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": True}, {"echo": True, "logprobs": True}, {"echo": True, "logprobs": True, "stream": True}],
)
async def test_a_long_prompts_logprobs(
    site: Site, monkeypatch: pytest.MonkeyPatch, fields: dict[str, bool], k: int
) -> None:
    seen = threads_of(monkeypatch, site.tokenizer, "token")
    asked = {name: k if name.endswith("logprobs") else value for name, value in fields.items()}
    response = await site.http.post("/v1/completions", json={"prompt": [60] * 60, "max_tokens": 1, **asked})
    assert response.status_code == 200
    assert {thread is HERE for thread in seen[:60]} == {k == 0}


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 0}])
async def test_choices_share_their_prompts_logprobs(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    site = make_site(lambda request, choice: [request.prompt_ids[0]])
    calls = threads_of(monkeypatch, site.tokenizer, "token")
    spelled, answers = [], []
    for n in (1, 5):
        calls.clear()
        answers.append(await site.post("/v1/completions", prompt=[[40] * 50, [50] * 50], n=n, max_tokens=1, **fields))
        spelled.append(len(calls))
    assert spelled[1] < spelled[0] + 20
    one, five = ([{**choice, "index": 0} for choice in answer["choices"]] for answer in answers)
    assert five == [choice for choice in one for _ in range(5)]


async def test_a_large_prompt_that_takes_too_long_is_refused(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that encodes it is killed, and the next prompt gets another. A client that leaves frees no thread."""
    monkeypatch.setattr("penstock.frontend.served.PromptWorkers", partial(PromptWorkers, seconds=0.3))
    site = make_site(max_model_len=4_000_000)
    hostile, plain = "ab" * 1_900_000, "hello world " * 6000
    assert (await site.post("/tokenize", prompt=plain))["tokens"] == site.tokenizer.encode(plain)
    for path, body in (
        ("/v1/completions", {"prompt": hostile}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": hostile}]}),
    ):
        response = await site.http.post(path, json={"max_tokens": 1, **body})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "prompt_too_slow"
        assert "0.3 s of processor time" in error["message"]
    assert (await site.post("/tokenize", prompt=plain))["count"] == len(site.tokenizer.encode(plain))


async def test_grammars_that_wait_keep_nothing_from_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may take its 0.7 s. One at a time is compiled."""
    go, running = asyncio.Event(), 0

    async def check(self: GrammarChecker, kind: str, text: str, trigger: str = "") -> Grammar:
        nonlocal running
        running += 1
        await go.wait()
        return Grammar("regex", text)

    monkeypatch.setattr(GrammarChecker, "check", check)
    asked = [{"prompt": "a", "max_tokens": 1, "guided_regex": "a" * i} for i in range(1, 70)]
    waiting = [asyncio.create_task(site.http.post("/v1/completions", json=body)) for body in asked]
    try:
        async with asyncio.timeout(PATIENCE):
            await until(lambda: running == 1 and sum(task.done() for task in waiting) == 69 - MAX_WAITING)
            assert (await site.http.get("/metrics")).status_code == 200
            assert (await site.post("/tokenize", prompt="hello " * 1500))["count"] > 1500
        assert running == 1
    finally:
        go.set()
    assert sorted(answer.status_code for answer in await asyncio.gather(*waiting)) == [200] * MAX_WAITING + [429] * 5


async def test_threads_whose_callers_leave_still_count() -> None:
    few, go = FewAtOnce(2), threading.Event()
    try:
        callers = [asyncio.create_task(few.in_thread(go.wait)) for _ in range(4)]
        await asyncio.sleep(0.05)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert few.waiting == 2
        later = asyncio.create_task(few.in_thread(lambda: "done"))
        await asyncio.sleep(0.05)
        assert not later.done()
    finally:
        go.set()
    assert await later == "done"
    async with asyncio.timeout(PATIENCE):
        while few.waiting:  # the threads of the callers that left end in their own time
            await asyncio.sleep(0.01)
