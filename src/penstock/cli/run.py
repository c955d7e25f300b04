"""Implements `penstock run`: one answer, or a conversation in the terminal."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.chat.arguments import join_prompt, piped_input, split_arguments
from penstock.cli.chat.flags import CHAT
from penstock.cli.options import Flags
from penstock.engine.link.engine_child import EngineChild
from penstock.weights.packaged import EMBEDDED, PACKAGED

if TYPE_CHECKING:
    from penstock.cli.chat.chat import Chat
    from penstock.cli.chat.screen import Screen
    from penstock.cli.prepare import PreparedModel
    from penstock.config import EngineConfig

NAMES = (*(model.name for model in PACKAGED), EMBEDDED)


@dataclass(frozen=True)
class _Session:
    """What the command line asks for. Without a prompt, messages come from the terminal."""

    prepared: "PreparedModel"
    prompt: str | None
    flags: Mapping[str, Any]  # of CHAT
    engine: EngineChild | None


def run(words: Sequence[str], model: str | None, flags: Flags, engine: EngineChild | None = None) -> None:
    """Answers the prompt in `words` and on standard input. Without one, talks to the terminal.

    `engine` is the engine process if the caller has already started one. It gets its configuration before this process
    imports what a conversation needs, so that both work at the same time.
    """
    model, prompt = split_arguments(words, model, NAMES)
    from penstock.cli.prepare import prepare

    prepared = prepare(model, {name: value for name, value in flags.items() if name not in CHAT})
    config = _quiet(prepared)
    if engine is not None:
        engine.send_config(config)
    own = {name: value for name, value in flags.items() if name in CHAT}
    piped = piped_input(prompt is not None)
    if piped is not None:
        prompt = join_prompt(prompt, piped, raw=bool(own.get("raw")))
    import asyncio

    try:
        status = asyncio.run(_main(_Session(prepared, prompt, own, engine)))
    except BrokenPipeError:  # the reader of the answer has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


async def _main(session: _Session) -> int:
    """Returns the exit status."""
    from penstock.cli.chat.chat import Chat
    from penstock.cli.chat.conversation import Conversation
    from penstock.cli.chat.screen import Screen, takes_colours
    from penstock.cli.chat.settings import ChatSettings
    from penstock.cli.chat.spinner import Spinner
    from penstock.cli.engine import own_engine
    from penstock.text import Tokenizer

    prepared, flags = session.prepared, dict(session.flags)
    config = _quiet(prepared)
    with Spinner(sys.stderr, f"loading {config.name}", shown=takes_colours(sys.stderr)) as spinner:
        # Texts are tokenised one at a time: the library's threads would only take processor time from the kernels.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = Tokenizer.load(prepared.path)
        system, raw = flags.pop("system", None), flags.pop("raw", False) or tokenizer.chat_template is None
        if raw and system is not None:
            why = "--raw has none" if session.flags.get("raw") else f"{config.name} has no chat template"
            raise ValueError(f"--system needs a chat, but {why}; leave --system out")
        settings = ChatSettings(prepared.generation, flags, raw=raw)
        if session.prompt is None:
            import prompt_toolkit  # noqa: F401  (it takes a while, and the engine is not ready yet)
        async with own_engine(config, session.engine) as client:
            spinner.stop()
            chat = Chat(client, tokenizer, settings, Conversation(system), raw=raw)
            screen = Screen(sys.stdout, sys.stderr)
            if session.prompt is None:
                return await _talk(chat, screen)
            await _answer_once(chat, screen, session.prompt)
    return 0


async def _talk(chat: "Chat", screen: "Screen") -> int:
    from penstock.cli.chat.prompt import Prompt
    from penstock.cli.chat.session import converse

    name = chat.client.info.model
    if chat.raw:
        screen.notice(f"{name} completes the text that you type. /? shows help, Ctrl-D leaves.")
    else:
        screen.notice(f"{name}: {chat.settings.sampling_summary()}. /? shows help, Ctrl-D leaves.")
    return await converse(chat, screen, Prompt(lambda: chat.settings["history"]))


async def _answer_once(chat: "Chat", screen: "Screen", prompt: str) -> None:
    with screen.answer(markdown=chat.settings["markdown"]) as shown:
        answer = await chat.answer(prompt, shown.write)
    if chat.settings["stats"]:
        screen.notice(answer.summary())
    if answer.end == "context":
        screen.notice(f"penstock: the answer was cut: the context of {chat.context} tokens is full")


def _quiet(prepared: "PreparedModel") -> "EngineConfig":
    """Returns the engine's configuration, in which it logs only what is wrong."""
    from msgspec.structs import replace

    return replace(prepared.resolved.engine, log_level="warning")
