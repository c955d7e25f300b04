"""Turns prompts into token ids in a worker process."""

import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.text.calls.chat_format import ChatFormat
from penstock.text.errors import ChatTemplateError, TokenizerError
from penstock.text.files import files_state
from penstock.text.prompts.encoder import PromptEncoder
from penstock.text.prompts.questions import PromptQuestion, PromptSetup, Refused
from penstock.text.tokenizer import Tokenizer


def prompt_answers(setup: PromptSetup) -> Callable[[bytes], bytes]:
    """Loads the tokenizer, and returns the function from a question to its answer, which ends the process when it takes
    too much processor time. Raises RuntimeError if the files are not those that the server has loaded."""
    path = Path(setup.path)
    tokenizer = Tokenizer.load(path)
    if not setup.files_state == tokenizer.files_state == files_state(path):
        raise RuntimeError(f"the tokenizer in {path} has changed since the server loaded it")
    chat_format = ChatFormat(tokenizer, setup.tool_format, setup.reasoning_format)
    encoder = PromptEncoder(tokenizer, chat_format, setup.max_model_len)
    decode = msgspec.json.Decoder(PromptQuestion).decode

    def answer(line: bytes) -> bytes:
        signal.setitimer(signal.ITIMER_PROF, setup.seconds)  # the signal's default action ends the process
        try:
            given: msgspec.Struct = encoder.encode(decode(line))
        except (TokenizerError, ChatTemplateError) as error:
            given = Refused(type(error).__name__, str(error))
        encoded = msgspec.json.encode(given)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return encoded

    return answer
