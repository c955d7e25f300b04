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
