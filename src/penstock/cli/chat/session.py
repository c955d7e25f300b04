"""An interactive session: reads messages, shows answers and executes commands until the user leaves."""

import asyncio
import contextlib
import signal
import sys
import termios
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, TypeVar

from penstock.cli.chat.chat import AnswerFigures, Chat
from penstock.cli.chat.commands import Leave, execute, is_command, oldest_turns
from penstock.cli.chat.entry import message
from penstock.cli.chat.screen import Screen
from penstock.messages import EngineError

if TYPE_CHECKING:
    from penstock.cli.chat.prompt import Prompt

T = TypeVar("T")
TERMINATED = 143  # exit status


async def converse(chat: Chat, screen: Screen, prompt: "Prompt") -> int:
    """Runs a session and returns its exit status. An error ends only the answer or the command that it is about."""
    status, interrupted = 0, False
    while True:
        try:
            text = await prompt.read()
        except EOFError:
            return status
        except KeyboardInterrupt:  # Ctrl-C at an empty prompt
            if interrupted:
                return status
            interrupted = True
            screen.notice("Ctrl-C again, Ctrl-D or /bye leaves.")
            continue
        interrupted = False
        if not text.strip():
            continue
        try:
            if is_command(text):
                screen.table(execute(chat, text))
            else:
                await _answer(chat, screen, message(text))
        except Leave:
            return status
        except EngineError as error:
            status = 1
            screen.error(f"{error}. /save FILE keeps the conversation; then leave and start again.")
        except ValueError as error:  # also a request that the engine refuses
            screen.error(str(error))


async def _answer(chat: Chat, screen: Screen, text: str) -> None:
    before = chat.conversation.forgotten
    answer = await show_answer(chat, screen, text)
    forgotten = chat.conversation.forgotten
    if forgotten > before:
        turns = oldest_turns(forgotten)
        screen.notice(f"(the context of {chat.context} tokens is full: the model no longer sees {turns})")
    if answer is None:
        kept = chat.last is not None and chat.last.kept
        screen.notice("(stopped; the conversation has the answer so far)" if kept else "(stopped)")
    elif not answer.tokens:
        screen.notice("(the model said nothing)")
    elif answer.end == "max_tokens":
        more = "" if chat.raw else 'type "go on", or '
        screen.notice(f"(cut at max_tokens {chat.settings['max_tokens']}; {more}/set max_tokens N allows more)")
    elif answer.end == "context":
        remedy = "" if chat.raw else "; ask to go on, or /clear"
        screen.notice(f"(cut: the context of {chat.context} tokens is full{remedy})")
    screen.space()


async def show_answer(chat: Chat, screen: Screen, text: str) -> AnswerFigures | None:
    """Streams an answer to the screen, and its figures if they are switched on. Returns None if Ctrl-C ended it."""
    with screen.answer(markdown=chat.settings["markdown"]) as shown:
        answer = await until_interrupted(chat.answer(text, shown.write))
    if chat.settings["stats"] and chat.last is not None:
        screen.notice(chat.last.summary())
    return answer


async def until_interrupted(work: Coroutine[None, None, T]) -> T | None:
    """Returns the result of `work`, or None if Ctrl-C cancelled it."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()  # this coroutine may have been cancelled
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
    return None if task.cancelled() else task.result()


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Keys typed while no prompt is shown do not appear. They wait for the next prompt; Ctrl-C still works."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that the terminal gets its modes back
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError, OSError):  # not a terminal
        yield
        return
    quiet = termios.tcgetattr(sys.stdin)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
