"""`penstock run`: its turns, without an engine."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.cli.chat.chat import Chat
from penstock.cli.chat.conversation import Conversation
from penstock.cli.chat.session import until_interrupted
from penstock.cli.chat.settings import ChatSettings
from penstock.messages import EngineError
from penstock.text import Tokenizer
from penstock.weights.packaged import embedded_model
from tests.frontend.scripted import ScriptedClient

HELLO = "hello"
CONTEXT = 64


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(embedded_model())


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedClient:
    """An engine that says hello, and then its stop token, which is an ordinary one."""
    ids, stop = tokenizer.encode(HELLO), tokenizer.encode("!")[0]
    return ScriptedClient(
        lambda request, choice: [*ids, stop], vocab_size=tokenizer.vocab_size, eos=stop, max_model_len=CONTEXT
    )


@pytest.fixture
def chat(engine: ScriptedClient, tokenizer: Tokenizer) -> Chat:
    return Chat(engine, tokenizer, ChatSettings({}, {"max_tokens": 20}), Conversation())


def nothing(text: str) -> None:
    """Shows no answer."""


async def test_a_conversation_goes_on(chat: Chat, engine: ScriptedClient, tokenizer: Tokenizer) -> None:
    said: list[str] = []
    for prompt in ("a", "b"):
        answer = await chat.answer(prompt, said.append)
    assert "".join(said) == HELLO * 2
    assert chat.conversation.turns == [("a", HELLO), ("b", HELLO)]
    assert (answer.end, answer.kept, answer.tokens) == ("complete", True, len(tokenizer.encode(HELLO)) + 1)
    assert chat.tokenizer.chat_template is not None
    rendered = chat.tokenizer.chat_template.render(Conversation(None, [("a", HELLO)]).messages("b"))
    assert engine.requests[1].prompt_ids == tuple(tokenizer.encode(rendered, add_special_tokens=False))


async def test_raw_prompts_are_completed_by_themselves(engine: ScriptedClient, tokenizer: Tokenizer) -> None:
    chat = Chat(engine, tokenizer, ChatSettings({}, {}, raw=True), Conversation(), raw=True)
    for _ in range(2):
        await chat.answer("import os\n", nothing)
    assert [request.prompt_ids for request in engine.requests] == [tuple(tokenizer.encode("import os\n"))] * 2
    assert chat.conversation.turns == []


async def test_a_turn_that_fails_is_no_part_of_it(chat: Chat) -> None:
    await chat.answer("a", nothing)
    with pytest.raises(ValueError, match=r"the prompt has [0-9]+ tokens; at most 56 fit in the context of 64"):
        await chat.answer("x " * 100, nothing)
    with pytest.raises(ValueError, match="has 20000 characters, more than the 16384 that could fit"):
        await chat.answer("x" * 20_000, nothing)
    with pytest.raises(ValueError, match="the prompt is empty"):
        await chat.answer(" \n", nothing)
    await chat.answer("b", nothing)
    assert chat.conversation.turns == [("a", HELLO), ("b", HELLO)]


async def test_an_engine_that_dies_ends_a_turn_only(chat: Chat, engine: ScriptedClient) -> None:
    engine.dies_after = 1
    with pytest.raises(EngineError):
        await chat.answer("a", nothing)
    engine.dies_after = None
    engine.row_error_after = 1
    with pytest.raises(ValueError, match="NaN in the logits"):
        await chat.answer("a", nothing)
    assert chat.conversation.turns == []


async def test_a_full_context_forgets_the_oldest_turns(chat: Chat, engine: ScriptedClient) -> None:
    for turn in range(12):
        await chat.answer(f"number {turn}", nothing)
        assert len(engine.requests[-1].prompt_ids) <= CONTEXT - 8
    forgotten = chat.conversation.forgotten
    assert 0 < forgotten < 11 and len(chat.conversation.turns) == 12
    last = chat.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert f"number {forgotten}\n" in last and f"number {forgotten - 1}\n" not in last
    await chat.answer("x " * 20, nothing)  # needs more space
    assert chat.conversation.forgotten > forgotten


async def test_an_answer_says_what_cut_it(chat: Chat) -> None:
    chat.settings.set("max_tokens", "1")
    assert (await chat.answer("a", nothing)).end == "max_tokens"
    chat.conversation.clear()
    chat.settings.set("max_tokens", "default")
    chat.client.output = lambda request, choice: chat.tokenizer.encode(" and")  # type: ignore[attr-defined]
    assert (await chat.answer("x " * 10, nothing)).end == "max_tokens"
    chat.settings.set("max_tokens", "1000")
    assert (await chat.answer("b", nothing)).end == "context"


class Interrupt(asyncio.Event):
    """The user presses Ctrl-C when an answer waits for it. No more tokens come."""

    async def wait(self) -> bool:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGINT)
        return await super().wait()


async def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(chat: Chat, engine: ScriptedClient) -> None:
    before = signal.getsignal(signal.SIGINT)
    engine.gate = Interrupt()
    for _ in range(2):
        assert await until_interrupted(chat.answer("a", nothing)) is None
    assert (len(engine.aborted), engine.running) == (2, 0)
    assert signal.getsignal(signal.SIGINT) is before
    assert chat.last is not None and (chat.last.end, chat.last.kept, chat.last.tokens) == ("stopped", True, 1)
    engine.gate = None
    assert await until_interrupted(chat.answer("b", nothing))
    first = chat.tokenizer.decode(chat.tokenizer.encode(HELLO)[:1])
    assert chat.conversation.turns == [("a", first), ("a", first), ("b", HELLO)]


async def test_ctrl_c_before_the_first_token_keeps_nothing(chat: Chat, engine: ScriptedClient) -> None:
    async def never(request: object) -> object:
        await Interrupt().wait()
        yield

    engine.generate = never  # type: ignore[method-assign, assignment]
    assert await until_interrupted(chat.answer("a", nothing)) is None
    assert chat.conversation.turns == []
    assert chat.last is not None and not chat.last.kept


async def test_what_an_answer_raises_is_told(chat: Chat) -> None:
    with pytest.raises(ValueError, match="at most 56 fit"):
        await until_interrupted(chat.answer("x " * 100, nothing))


async def test_a_long_saved_conversation_is_cut_before_it_is_tokenised(chat: Chat, tmp_path: Path) -> None:
    chat.conversation.turns = [("x" * 10_000, "y" * 10_000) for _ in range(50)] + [("a", "b")]
    await chat.answer("c", nothing)
    assert chat.conversation.forgotten == 50
