"""A process that checks grammars: python -m penstock.text.grammars.worker

A hostile grammar can keep llguidance busy for hours, and a thread cannot be stopped. So grammars are compiled here
first. The system ends this process when a grammar takes too long or too much memory, and the next one gets a new one.
The first line of standard input is a Setup, each later line a Source; a Checked is the answer to each.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.messages import Grammar
from penstock.text.grammars.compile import compile_grammar, first_line, lark_of, lark_of_choices
from penstock.text.grammars.questions import DEADLINE, Checked, Setup, Source
from penstock.text.grammars.schema import GrammarError, read_schema

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MEMORY = 1 << 30  # bytes of address space beyond what the process has at its start
ONE_OF = (
    "the keyword 'oneOf' is supported only if its schemas provably exclude each other, as those of objects that have "
    "a required property with different constants; use 'anyOf'"
)


class ByteTokens:
    """A vocabulary in llguidance's form that has a token for every byte, and the special tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, setup: Setup) -> None:
        free = (i for i in range(setup.vocab_size + 256) if i not in setup.special)
        at = [next(free) for _ in range(256)]
        self.tokens = [b""] * max(setup.vocab_size, at[-1] + 1)
        for byte, token_id in enumerate(at):
            self.tokens[token_id] = bytes([byte])
        for token_id, text in setup.special.items():
            self.tokens[token_id] = text.encode()
        self.special_token_ids = sorted(setup.special)
        self.eos_token_id = setup.eos_token_id
        self._at = at

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._at[byte] for byte in (text if isinstance(text, bytes) else text.encode())]


def main() -> None:
    """Answer requests until standard input ends."""
    from llguidance import LLTokenizer

    tokens: Any = ByteTokens(msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup))
    tokenizer = LLTokenizer(tokens, eos_token=[tokens.eos_token_id])
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)  # a grammar that takes its second must not take it from the server's streams
    decoder = msgspec.json.Decoder(Source)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    while line := sys.stdin.buffer.readline():
        source = decoder.decode(line)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE)  # the signal's default action ends the process
        try:
            answer = Checked(check(tokenizer, source))
        except (GrammarError, ValueError) as error:
            answer = Checked(error=str(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def check(tokenizer: "LLTokenizer", source: Source) -> Grammar:
    """Returns the grammar as the engine is to read it. Raises GrammarError or ValueError."""
    if source.kind == "json_schema":
        grammar = Grammar("json_schema", read_schema(source.text), source.trigger)
    elif source.kind == "choice":
        grammar = Grammar("lark", lark_of_choices(msgspec.json.decode(source.text, type=list[str])), source.trigger)
    elif source.kind == "grammar":
        grammar = Grammar("lark", lark_of(source.text), source.trigger)
    else:
        grammar = Grammar("regex", source.text, source.trigger)
    matcher = compile_grammar(tokenizer, grammar)
    if matcher.is_error():
        error = first_line(matcher.get_error())
        raise GrammarError(ONE_OF if "coerce_one_of" in error else error)
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarError("no text satisfies it; it may refer to itself without end")
    return grammar


if __name__ == "__main__":
    main()
