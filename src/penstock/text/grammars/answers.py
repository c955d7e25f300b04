"""Checks grammars in a worker process, since a hostile one can keep llguidance busy for hours."""

import ctypes
import os
import random
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from penstock.messages import GRAMMAR_TOO_COMPLEX, Grammar
from penstock.text.grammars.compile import compile_grammar, first_line, lark_of, lark_of_choices
from penstock.text.grammars.copies import CompiledGrammar, GrammarCopy
from penstock.text.grammars.questions import DEADLINE, Checked, Setup, Source
from penstock.text.grammars.schema import GrammarError, read_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WALKS = 2  # texts of a grammar that are followed
WALK_BYTES, AMBIGUOUS_WALK_BYTES = 64, 512  # of each: what is slow later costs a client that many bytes each time

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
        self.used = [*at, *(i for i in self.special_token_ids if i != setup.eos_token_id)]
        self._at = at

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._at[byte] for byte in (text if isinstance(text, bytes) else text.encode())]


def grammar_answers(setup: Setup) -> Callable[[bytes], bytes]:
    """Returns the function from a Source to a Checked, which ends the process when it takes too long."""
    from llguidance import LLTokenizer

    tokens = ByteTokens(setup)
    tokenizer = LLTokenizer(cast(Any, tokens), eos_token=[tokens.eos_token_id])
    os.nice(5)  # a grammar that takes its second must not take it from the server's streams
    decode = msgspec.json.Decoder(Source).decode

    def answer(line: bytes) -> bytes:
        source = decode(line)
        signal.setitimer(signal.ITIMER_PROF, DEADLINE)  # the signal's default action ends the process
        try:
            checked = Checked(check(tokenizer, source, tokens))
        except (GrammarError, ValueError) as error:
            checked = Checked(error=str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        return msgspec.json.encode(checked)

    return answer


def check(tokenizer: "LLTokenizer", source: Source, tokens: ByteTokens) -> Grammar:
    """Returns the grammar as the engine is to read it. Raises GrammarError or ValueError."""
    if source.kind == "json_schema":
        grammar = Grammar("json_schema", read_schema(source.text), source.trigger)
    elif source.kind == "choice":
        grammar = Grammar("lark", lark_of_choices(msgspec.json.decode(source.text, type=list[str])), source.trigger)
    elif source.kind == "grammar":
        grammar = Grammar("lark", lark_of(source.text), source.trigger)
    else:
        grammar = Grammar(source.kind, source.text, source.trigger)
    matcher = compile_grammar(tokenizer, grammar)
    if matcher.is_error():
        error = first_line(matcher.get_error())
        raise GrammarError(ONE_OF if "coerce_one_of" in error else error)
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarError("no text satisfies it; it may refer to itself without end")
    count = AMBIGUOUS_WALK_BYTES if grammar.kind == "lark" else WALK_BYTES
    for walk in range(WALKS):
        _follow_a_text(matcher, tokens, random.Random(walk), count)
    return grammar


def _follow_a_text(matcher: "LLMatcher", tokens: ByteTokens, source: random.Random, count: int) -> None:
    """Raises GrammarError if some text of the grammar is too much work within `count` bytes. An ambiguous grammar
    becomes slow after a few bytes, and then a step of the engine would wait for it."""
    size = -(-len(tokens.tokens) // 32) * 4
    mask = ctypes.create_string_buffer(size)
    copy = GrammarCopy(CompiledGrammar(matcher, 0.0), lambda failed: None)
    for _ in range(count):
        copy.compute(ctypes.addressof(mask), size, [])
        bits = mask.raw
        allowed = [] if copy.error else [i for i in tokens.used if bits[i >> 3] >> (i & 7) & 1]
        if not allowed:
            break
        copy.consume(source.choice(allowed))
    if copy.error.startswith(GRAMMAR_TOO_COMPLEX):  # another error is a dead end, which no output must take
        raise GrammarError(f"{copy.error}; simplify it")
