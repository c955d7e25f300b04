"""Implements `penstock run`: one answer, or a conversation in the terminal."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli.chat.arguments import join_prompt, piped_input, split_arguments
from penstock.cli.chat.flags import CHAT
from penstock.cli.options import Flags
from penstock.engine.link.engine_child import EngineChild
from penstock.weights.packaged import EMBEDDED, PACKAGED

if TYPE_CHECKING:
    from penstock.cli.chat.chat import Chat
    from penstock.cli.chat.prompt import Prompt
    from penstock.cli.chat.screen import Screen
    from penstock.cli.chat.settings import ChatSettings
    from penstock.config import EngineConfig

NAMES = (*(model.name for model in PACKAGED), EMBEDDED)


@dataclass(frozen=True)
class _ChatSetup:
    """The model and the settings of a session."""

    config: "EngineConfig"
    recommended: Mapping[str, float]  # sampling values
    flags: Flags  # of CHAT
    engine: EngineChild | None  # a process that has `config`


def run(words: Sequence[str], model: str | None, flags: Flags, engine: EngineChild | None = None) -> None:
    """Answers the prompt in `words` and on standard input. Without one, talks to the terminal.

    `engine` is the engine process if the caller has already started one. It gets its configuration before this process
    imports what a conversation needs, so that both work at the same time.
    """
    model, prompt = split_arguments(words, model, _names(words))
    import asyncio

    from msgspec.structs import replace

    from penstock.prepare.model import prepare

    prepared = prepare(model, {name: value for name, value in flags.items() if name not in CHAT})
    config = replace(prepared.resolved.engine, log_level="warning")
    if engine is not None:
        engine.send_config(config)
    own = {name: value for name, value in flags.items() if name in CHAT}
    piped = piped_input(prompt is not None)
    if not (prompt or "").strip() and not (piped or "").strip() and (prompt, piped) != (None, None):
        raise ValueError("the prompt is empty; write at least a word")
    try:
        status = asyncio.run(_main(_ChatSetup(config, prepared.generation, own, engine), prompt, piped))
    except BrokenPipeError:  # the reader of the answer has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _names(words: Sequence[str]) -> Sequence[str]:
    """Returns the names that the first word may be."""
    if not words or words[0] in NAMES or any(map(str.isspace, words[0])):
        return NAMES
    from penstock.weights.local_models import known_names

    return list(dict.fromkeys((*NAMES, *known_names())))


async def _main(session: _ChatSetup, prompt: str | None, piped: str | None) -> int:
    """Returns the exit status."""
    from penstock.cli.chat.chat import Chat
    from penstock.cli.chat.conversation import Conversation
    from penstock.cli.chat.safe_text import one_line
    from penstock.cli.chat.screen import Screen
    from penstock.cli.chat.session import quiet_terminal
    from penstock.cli.chat.settings import ChatSettings
    from penstock.observe.reporting import reporting
    from penstock.prepare.engine import own_engine
    from penstock.text import Tokenizer

    config = session.config
    interactive = prompt is None and piped is None
    with quiet_terminal() if interactive else contextlib.nullcontext(), contextlib.ExitStack() as loading:
        loading.enter_context(reporting(f"loading {one_line(config.name)}"))
        # Texts are tokenised one at a time: the library's threads would only take processor time from the kernels.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = Tokenizer.load(config.model)
        flags = dict(session.flags)
        system, raw = flags.pop("system", None), flags.pop("raw", False) or tokenizer.chat_template is None
        if raw and system is not None:
            why = "--raw has none" if tokenizer.chat_template else f"{config.name} has no chat template"
            raise ValueError(f"--system needs a chat, but {why}; leave --system out")
        settings = ChatSettings(session.recommended, flags, raw=raw)
        if piped is not None:
            prompt = join_prompt(prompt, piped, raw=raw)
        terminal = _terminal(settings) if prompt is None else None
        async with own_engine(config, session.engine) as client:
            loading.close()
            chat = Chat(client, tokenizer, settings, Conversation(system), raw=raw)
            screen = Screen(sys.stdout, sys.stderr)
            if terminal is not None:
                return await _talk(chat, screen, terminal)
            return await _answer(chat, screen, prompt or "")


def _terminal(settings: "ChatSettings") -> "Prompt":
    from penstock.cli.chat.prompt import Prompt  # takes a while, in which the engine loads the model

    return Prompt(lambda: bool(settings["history"]))


async def _talk(chat: "Chat", screen: "Screen", terminal: "Prompt") -> int:
    from penstock.cli.chat.session import converse

    what = "completes the text that you type" if chat.raw else chat.settings.sampling_summary()
    screen.notice(f"{chat.client.info.model}: {what}. /? shows help, Ctrl-D leaves.")
    return await converse(chat, screen, terminal)


async def _answer(chat: "Chat", screen: "Screen", prompt: str) -> int:
    with screen.answer(markdown=chat.settings["markdown"]) as shown:
        answer = await chat.answer(prompt, shown.write)
    if chat.settings["stats"]:
        screen.notice(answer.summary())
    if answer.end == "context":
        screen.notice(f"penstock: the answer was cut: the context of {chat.context} tokens is full")
    elif answer.end == "max_tokens" and not chat.raw and chat.settings.source("max_tokens") == "default":
        screen.notice(
            f"penstock: the answer was cut at {chat.settings['max_tokens']} tokens; --max-tokens N allows more"
        )
    return 0
