"""Chats that are too long for the model and go on with a summary of their oldest turns."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anthropic
import pytest

from penstock.frontend.errors import ContextOverflow
from penstock.frontend.requests import summary
from penstock.frontend.requests.context_policy import (
    INSTRUCTION,
    MOST_SUMMARIES,
    RETRY_SECONDS,
    ContextRoom,
    LeftOut,
    Summaries,
    Summary,
    check_summariser,
    encode_summarised,
)
from penstock.messages import GenerateRequest
from penstock.text.prompts import Encoded
from tests.frontend.conftest import NAME, Site, live
from tests.frontend.test_context_policy import SYSTEM, conversation
from tests.patience import PATIENCE

Sites = Callable[..., Site]
CONTEXT = 1000
GIST = "they met"


def summarising(site: Site, gist: str = GIST) -> None:
    """Makes the engine say a summary when one is asked for, and something else otherwise."""
    eos = site.engine.info.eos_token_ids[0]
    said = {each: [*site.tokenizer.encode(each, add_special_tokens=False), eos] for each in (gist, "hello")}
    site.engine.output = lambda request, choice: said[gist if asks(site, request) else "hello"]


def asks(site: Site, request: GenerateRequest) -> bool:
    return INSTRUCTION in site.tokenizer.decode(list(request.prompt_ids))


@pytest.fixture
def site(make_site: Sites) -> Site:
    site = make_site(max_model_len=CONTEXT, context_policy=f"summarise:{NAME}")
    summarising(site)
    return site


async def ask(site: Any, turns: int, **fields: Any) -> Any:
    body = {"model": NAME, "messages": conversation(turns), "max_tokens": 8, **fields}
    answer = await site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_growing_session_is_summarised_seldom_and_its_prefix_stays(site: Site) -> None:
    """Each cut has one summary, of the summary before and the turns since."""
    seen: list[int] = []
    before: tuple[tuple[int, ...], int] = ((), 0)
    for turns in range(1, 120):
        first = len(site.engine.requests)
        answer = await ask(site, turns)
        *asked, last = site.engine.requests[first:]
        assert [asks(site, request) for request in asked] in ([], [True]) and not asks(site, last)
        used = answer.json()["usage"].get("summary")
        count = int(answer.headers.get("x-summarised-messages", "0"))
        assert "x-dropped-messages" not in answer.headers and count == (used or {}).get("messages", 0)
        seen.append(count)
        text = site.tokenizer.decode(list(last.prompt_ids))
        assert len(last.prompt_ids) + 8 <= CONTEXT
        assert f"user {turns - 1} " in text and (f"user {count // 2} " in text) and "be kind" in text
        assert (f"[Earlier in this conversation: {GIST}]\n\nuser {count // 2} " in text) == bool(count)
        assert count == 0 or f"user {count // 2 - 1} " not in text
        if not asked:
            assert used is None or (not used["prompt_tokens"] and "x-summary-tokens" not in answer.headers)
        else:
            (request,) = asked
            written = f"{len(request.prompt_ids)}, {used['completion_tokens']}"
            assert answer.headers["x-summary-tokens"] == written and used["prompt_tokens"] == len(request.prompt_ids)
            assert used["completion_tokens"] == len(site.tokenizer.encode(GIST, add_special_tokens=False)) + 1
            assert (request.sampling.temperature, request.sampling.max_tokens) == (0.0, CONTEXT // 16)
            kept = before[0][: len(before[0]) // 2]
            assert request.prompt_ids[: len(kept)] == kept, "the prefix cache has the turns already"
            old = site.tokenizer.decode(list(request.prompt_ids))
            assert f"user {count // 2 - 1} " in old and f"user {count // 2} " not in old
            assert (f"[Earlier in this conversation: {GIST}]\n\nuser {before[1] // 2} " in old) == bool(before[1])
        before = last.prompt_ids, count
    cuts = sorted({*seen} - {0})
    assert seen == sorted(seen) and all(after - before >= 12 for before, after in pairwise([0, *cuts])), cuts
    assert len(cuts) > 10
    tokens = [len(request.prompt_ids) for request in site.engine.requests if not asks(site, request)]
    after = [now for past, now in pairwise(tokens) if now < past]
    assert max(after) < 0.7 * CONTEXT, "a cut leaves room for many turns"


async def test_all_chat_wires_and_streams_say_so(site: Site) -> None:
    turns = conversation(50)
    count = (await ask(site, 50)).headers["x-summarised-messages"]
    called = len(site.engine.requests)
    for path, body in (
        ("/v1/chat/completions", {"messages": turns, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/messages", {"messages": turns[1:], "system": "be kind", "max_tokens": 8}),
        ("/v1/messages", {"messages": turns[1:], "system": "be kind", "max_tokens": 8, "stream": True}),
        ("/v1/responses", {"input": turns, "max_output_tokens": 8}),
        ("/v1/responses", {"input": turns, "truncation": "auto", "stream": True}),
        ("/api/chat", {"messages": turns, "stream": False}),
        ("/api/chat", {"messages": turns}),
    ):
        answer = await site.http.post(path, json={"model": NAME, **body})
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["x-summarised-messages"] == count, path
        assert ("hello" in answer.text or body.get("stream") is not False) and "x-summary-tokens" not in answer.headers
    assert len(site.engine.requests) == called + 7, "the summary is there for all of them"
    events = await site.events("/v1/chat/completions", messages=turns, stream_options={"include_usage": True})
    assert events[-1]["usage"]["summary"]["messages"] == int(count)


async def test_anthropics_client_reads_such_a_stream(site: Site) -> None:
    async with live(site) as port, anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="x") as client:
        turns: Any = conversation(50)[1:]
        async with client.messages.stream(model=NAME, max_tokens=8, messages=turns) as stream:
            assert await stream.get_final_text() == "hello"
            assert int(stream.response.headers["x-summarised-messages"]) > 0


@pytest.mark.parametrize(
    ("policy", "code"),
    [("nobody", "model_not_found"), (NAME, "deadline_exceeded"), (NAME, "empty_summary"), (NAME, "engine_unavailable")],
)
async def test_without_a_summary_the_oldest_turns_go_and_the_answer_says_why(
    make_site: Sites, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str, code: str
) -> None:
    site = make_site(max_model_len=CONTEXT, context_policy=f"summarise:{policy}")
    summarising(site, "" if code == "empty_summary" else GIST)
    plays = site.engine.generate
    if code == "deadline_exceeded":
        monkeypatch.setattr(summary, "MOST_SECONDS", 0.2)

    async def generate(request: GenerateRequest, gather: int = 1) -> Any:
        if asks(site, request) and code == "deadline_exceeded":
            await asyncio.sleep(PATIENCE)
        site.engine.dies_after = 0 if asks(site, request) and code == "engine_unavailable" else None
        async for delta in plays(request, gather):
            yield delta

    monkeypatch.setattr(site.engine, "generate", generate)
    plain = make_site(max_model_len=CONTEXT, context_policy="drop-oldest")
    for turn in (50, 51):
        answer, want = await ask(site, turn), await ask(plain, turn)
        assert answer.headers["x-summary-failed"] == code
        assert answer.headers["x-dropped-messages"] == want.headers["x-dropped-messages"] != "0"
        used = answer.json()["usage"]
        assert used["summary"]["failed"] == code and used["summary"]["messages"] == 0
        assert used["dropped_messages"] == want.json()["usage"]["dropped_messages"]
        assert site.engine.requests[-1].prompt_ids == plain.engine.requests[-1].prompt_ids
    asked = [request for request in site.engine.requests if asks(site, request)]
    assert len(asked) <= 1, "one that failed is not tried again at once"
    assert code == "empty_summary" or any("gets no summary" in text for text in caplog.messages)


async def test_a_request_keeps_half_of_its_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    plays, waited, late = site.engine.generate, list[float](), list[float]()

    async def generate(request: GenerateRequest, gather: int = 1) -> Any:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        loop.call_at(begin + 1.4, lambda: late.append(loop.time() - begin - 1.4))  # while the machine stood still
        try:
            if asks(site, request):
                await asyncio.sleep(PATIENCE)
        finally:
            waited.append(loop.time() - begin)
        async for delta in plays(request, gather):
            yield delta

    monkeypatch.setattr(site.engine, "generate", generate)
    body = {"model": NAME, "messages": conversation(50), "max_tokens": 8}
    answer = await site.http.post("/v1/chat/completions", json=body, headers={"x-request-timeout": "3"})
    assert answer.status_code == 200 and answer.headers["x-summary-failed"] == "deadline_exceeded"
    assert 0.5 < waited[0] - sum(late[:1]) <= 1.6


async def test_a_chat_whose_last_turn_leaves_no_room_is_not_summarised(site: Site) -> None:
    for size, code in ((1, 200), (900, 400)):
        chat = [SYSTEM, *conversation(10)[1:-1], {"role": "user", "content": "hello " * size}]
        answer = await site.http.post("/v1/chat/completions", json={"model": NAME, "messages": chat})
        assert answer.status_code == code
    last = {"role": "user", "content": "hello "}
    while len(await tokens(site, [SYSTEM, last])) < CONTEXT - 40:
        last["content"] += "hello "
    body = {"model": NAME, "messages": [*conversation(10)[:-1], last], "max_tokens": 8}
    answer = await site.http.post("/v1/chat/completions", json=body)
    assert answer.headers["x-summary-failed"] == "no_room" and answer.headers["x-dropped-messages"] == "18"


async def tokens(site: Site, messages: list[dict[str, str]]) -> list[int]:
    found: list[int] = (await site.post("/tokenize", messages=messages))["tokens"]
    return found


class Supervised:
    """One of several API processes, beside a supervisor that has the summaries of all."""

    def __init__(self, supervisor: Summaries) -> None:
        self.supervisor, self.sent = supervisor, list[Any]()

    async def ask(self, message: str) -> str:
        for earlier in self.sent:
            await self.supervisor.answer(earlier)
        self.sent.clear()
        return await self.supervisor.answer(message.removeprefix("summary "))

    def notify(self, message: str) -> None:
        self.sent.append(message.removeprefix("summary "))


async def test_api_processes_share_summaries() -> None:
    one, other, supervisor = Summaries(), Summaries(), Summaries()
    for each in (one, other):
        each.siblings = Supervised(supervisor)  # type: ignore[assignment]
    assert await one.find(b"key") is None and await other.find(b"key") is None
    one.add(b"key", Summary("sa\nid \u2028", 1, 10, 20))
    assert await one.find(b"unknown") is None
    assert await other.find(b"key") == await one.find(b"key") == Summary("sa\nid \u2028", 1)
    other.siblings = None
    assert await other.find(b"key") == Summary("sa\nid \u2028", 1), "it is kept here, too"


async def test_summaries_are_bounded_and_failures_end() -> None:
    now = [0.0]
    kept = Summaries(lambda: now[0])
    kept.add(b"first", Summary("text", 1, 10, 20))
    kept.add(b"failed", Summary(failure="deadline_exceeded"))
    assert await kept.find(b"first") == Summary("text", 1), "its tokens count for the request that it was written for"
    assert await kept.find(b"failed") == Summary(failure="deadline_exceeded")
    now[0] = RETRY_SECONDS
    assert await kept.find(b"failed") is None and await kept.find(b"other") is None
    for number in range(MOST_SUMMARIES - 1):
        await kept.find(b"first")
        kept.add(b"%d" % number, Summary("more"))
    assert await kept.find(b"first") and len(kept._found) == MOST_SUMMARIES
    kept.add(b"last", Summary("more"))
    assert await kept.find(b"0") is None and await kept.find(b"first") and len(kept._found) == MOST_SUMMARIES


async def test_what_a_small_summariser_did_not_see_counts_as_dropped() -> None:
    async def encode(part: Any) -> Encoded:
        size = sum(len(each["content"]) for each in part)
        if size > 400:
            raise ContextOverflow("messages", size, 400)
        return Encoded((0,) * size)

    async def write(old: Any, most: int) -> Summary:
        assert [each["content"] for each in old][:1] == ["user 0 hello hello hello "] and most == 32
        return Summary("x", 4, 100, 2)

    chat = conversation(20)[1:]
    room = ContextRoom(encode, 400, 8)
    encoded, left = await encode_summarised(chat, room, write, Summaries(), "")
    assert left.dropped == 4 and left.summarised > 0 and (left.prompt_tokens, left.completion_tokens) == (100, 2)
    kept = len(chat) - left.dropped - left.summarised
    assert len(encoded.ids) == sum(len(each["content"]) for each in chat[-kept:]) + len(
        "[Earlier in this conversation: x]\n\n"
    )
    assert LeftOut().headers == LeftOut().usage == {}


def test_a_model_that_is_not_served_is_refused_at_the_start() -> None:
    check_summariser("error", [])
    check_summariser("summarise:org/name:Q4", ["org/name:Q4"])
    with pytest.raises(ValueError, match="no model 'other'; name one that is served"):
        check_summariser("summarise:other", [NAME])
