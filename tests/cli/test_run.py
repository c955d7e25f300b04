"""`penstock run`: its turns, without an engine."""

import asyncio
import os
import signal

import pytest

from penstock.cli.run import ChatSession, RunOptions, runs_to_end
from penstock.text import Tokenizer
from penstock.weights.packaged import embedded_model
from tests.frontend.scripted import ScriptedClient

HELLO = "hello"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(embedded_model())


@pytest.fixture
def session(tokenizer: Tokenizer) -> ChatSession:
    """A conversation with an engine that says hello, and then its stop token, which is an ordinary one."""
    ids = tokenizer.encode(HELLO)
    stop = tokenizer.encode("!")[0]
    client = ScriptedClient(lambda request, choice: [*ids, stop], vocab_size=tokenizer.vocab_size, eos=stop)
    return ChatSession(client, tokenizer, RunOptions(max_tokens=20, temperature=0, top_p=1, seed=0, chat=True))


async def test_a_conversation_goes_on(session: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    await session.answer("a")
    await session.answer("b")
    assert capsys.readouterr().out == "hello\nhello\n"
    assert [message["content"] for message in session.messages] == ["a", HELLO, "b", HELLO]


async def test_a_turn_that_fails_is_no_part_of_it(session: ChatSession) -> None:
    await session.answer("a")
    with pytest.raises(
        ValueError, match=r"the prompt with the conversation before it has [0-9]+ tokens; it must have 1 "
    ):
        await session.answer("x " * 100)
    await session.answer("b")
    assert [message["content"] for message in session.messages] == ["a", HELLO, "b", HELLO]


async def test_ctrl_c_ends_an_answer_and_not_the_session(session: ChatSession) -> None:
    engine, before = session.client, signal.getsignal(signal.SIGINT)
    assert isinstance(engine, ScriptedClient)
    engine.gate = asyncio.Event()  # nothing comes after the first token
    for _ in range(2):
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
        assert not await runs_to_end(session.answer("a"))
    assert (len(engine.aborted), engine.running) == (2, 0)
    assert signal.getsignal(signal.SIGINT) is before
    engine.gate.set()
    assert await runs_to_end(session.answer("b"))
    assert [message["content"] for message in session.messages] == ["b", HELLO]


async def test_what_an_answer_raises_is_told(session: ChatSession) -> None:
    with pytest.raises(ValueError, match="it must have 1 to"):
        await runs_to_end(session.answer("x " * 100))
