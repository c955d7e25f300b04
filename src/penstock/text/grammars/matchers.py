"""Follows outputs through their grammars, in the engine: which tokens are allowed next.

llguidance computes the masks, several at once in its own threads. A grammar is compiled once, in a thread of its own;
every sequence then gets a copy, which takes microseconds. All of this is loaded by the first grammar.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.messages import GRAMMAR_TOO_COMPLEX, Grammar, Thinking
from penstock.text.grammars.compile import compile_grammar, first_line
from penstock.text.grammars.thinking import AllowedTokens, Thinker, ThinkingMarkers
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_COMPILED = 64  # grammars that are kept; a state of one takes about 2 kB, and it has at most 20,000
MAX_COMPILED_BYTES = 1 << 20  # of their texts
MAX_THREADS = 8
_REFUSED = "doesn't satisfy the grammar"  # llguidance's words for a token that the grammar does not have


class Trigger:
    """The text that a grammar waits for.

    A token that completes the trigger and goes on would put text into the grammar's part that it never saw. So such
    tokens are not allowed where they would do that.
    """

    def __init__(self, text: bytes, vocabulary: Sequence[bytes]) -> None:
        self.text = text
        # By how much of the trigger the output ends with: the tokens that complete it and go on.
        self._beyond: list[list[int]] = [[] for _ in text]
        for token_id, token in enumerate(vocabulary):
            at = token.find(text)
            if 0 <= at < len(token) - len(text):
                self._beyond[0].append(token_id)
            for known in range(1, len(text)):
                rest = text[known:]
                if len(token) > len(rest) and token.startswith(rest):
                    self._beyond[known].append(token_id)

    def left_out(self, tail: bytes) -> list[int]:
        """The tokens that are not allowed after a text with this end."""
        known = (i for i in range(len(self.text)) if tail.endswith(self.text[:i]))
        return [token_id for i in known for token_id in self._beyond[i]]


class _CompiledGrammar(NamedTuple):
    matcher: "LLMatcher | None"  # None: any text
    trigger: Trigger | None


class GrammarMatcher:
    """See runtime's Matcher."""

    __slots__ = ("_ended", "_stops", "_tail", "_thinker", "_trigger", "_vocabulary", "error", "matcher")

    def __init__(
        self, compiled: _CompiledGrammar, vocabulary: Sequence[bytes], stops: frozenset[int], thinker: Thinker | None
    ) -> None:
        self.matcher = None if compiled.matcher is None else compiled.matcher.deep_copy()
        self.error = "" if self.matcher is None else first_line(self.matcher.get_error())
        self._trigger = compiled.trigger
        self._vocabulary = vocabulary
        self._stops = stops if compiled.matcher is not None else frozenset[int]()  # without a grammar nothing ends
        self._thinker = thinker
        self._tail = b""
        self._ended = False

    def free(self, tokens: int) -> bool:
        if self._ended:
            return True
        if self._thinker is not None and not self._thinker.free(tokens):
            return False
        if self._trigger is None:
            return self.matcher is None
        return not tokens and (self._waits(self._trigger, self._thinker) or not self._trigger.left_out(self._tail))

    @staticmethod
    def _waits(trigger: Trigger, thinker: Thinker | None) -> bool:
        """Whether the trigger is not looked for: a tool call in reasoning is none."""
        return thinker is not None and thinker.on and trigger.text != thinker.end_marker

    def look_ahead(self, drafts: Sequence[int]) -> tuple[list[list[int]], dict[int, AllowedTokens]]:
        """Returns the tokens that are left out for the next token and for those after each draft, as far as the grammar
        is not in force: up to the trigger, or after the end. Also returns the only tokens that may come where reasoning
        must end."""
        free: list[list[int]] = []
        only: dict[int, AllowedTokens] = {}
        trigger, tail, ended, held = self._trigger, self._tail, self._ended, False
        thinker = None if self._thinker is None else self._thinker.copy()
        for place, token_id in enumerate((*drafts, -1)):
            if thinker is not None and thinker.allowed is not None and not ended:
                only[place] = thinker.allowed
            waits = trigger is None or self._waits(trigger, thinker)
            held = held or (trigger is None and self.matcher is not None and not ended)
            if not held:
                free.append([] if trigger is None or waits or ended else trigger.left_out(tail))
            elif thinker is None:
                break
            text = self._bytes_of(token_id)
            if thinker is not None:
                thinker.take(text)
            if trigger is not None and not waits:
                text = tail + text
                trigger, tail = (None, b"") if text.endswith(trigger.text) else (trigger, text[-len(trigger.text) :])
                if trigger is None and thinker is not None:
                    thinker.answer()
            ended = ended or token_id in self._stops
        return free, only

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._ended or self.error:
                return
            trigger = self._trigger
            waits = trigger is not None and self._waits(trigger, self._thinker)
            if self._thinker is not None:
                self._thinker.take(self._bytes_of(token_id))
            if trigger is not None:
                if not waits:
                    self._look(trigger, token_id)
            elif self.matcher is not None and not self.matcher.consume_token(token_id):
                refused = _REFUSED in self.matcher.get_error()  # else the grammar has met a limit of the library
                self.fail(f"the request's grammar cannot be followed beyond token {token_id}" if refused else "")
            self._ended = token_id in self._stops

    def forced(self) -> Sequence[int]:
        held = self.matcher is not None and self._trigger is None and not (self._ended or self.error)
        if not held or self.matcher is None or (self._thinker is not None and not self._thinker.free(0)):
            return ()
        return self.matcher.compute_ff_tokens()

    def fail(self, what: str = "") -> None:
        """Notes that the matcher cannot go on."""
        reason = "" if self.matcher is None else first_line(self.matcher.get_error())
        self.error = ": ".join(part for part in (what or GRAMMAR_TOO_COMPLEX, reason) if part)

    def _look(self, trigger: Trigger, token_id: int) -> None:
        """Looks for the trigger in the output."""
        text = self._tail + self._bytes_of(token_id)
        if text.endswith(trigger.text):
            self._trigger = None
            if self._thinker is not None:
                self._thinker.answer()
        else:
            self._tail = text[-len(trigger.text) :]

    def _bytes_of(self, token_id: int) -> bytes:
        return self._vocabulary[token_id] if 0 <= token_id < len(self._vocabulary) else b""


class GrammarMatchers:
    """See runtime's Grammars."""

    def __init__(
        self, load: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int], *, threads: int
    ) -> None:
        """`load` gives the model's tokenizer. `vocab_size` is the width of the logits. Masks are computed by at most
        `threads` threads."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._stops = frozenset(eos_token_ids)
        self._threads = max(1, min(threads, MAX_THREADS))
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._compiled: OrderedDict[Grammar, Future[_CompiledGrammar]] = OrderedDict()
        self._bytes = 0
        self._vocabulary: list[bytes] = []
        self._text: Tokenizer | None = None  # the model's
        self._tokenizer: LLTokenizer | None = None
        self._known_markers: dict[tuple[str, str, tuple[str, ...]], ThinkingMarkers] = {}
        self._executor: LLExecutor | None = None

    def prepare(self, grammar: Grammar) -> bool:
        return self._future(grammar).done()

    def matcher(self, grammar: Grammar, output_ids: Sequence[int]) -> GrammarMatcher:
        compiled = self._future(grammar).result()
        thinker = None
        if grammar.thinking is not None:
            strict = compiled.matcher is not None and compiled.trigger is None
            thinker = Thinker(self._markers(grammar.thinking), grammar.thinking, strict=strict)
        matcher = GrammarMatcher(compiled, self._vocabulary, self._stops, thinker)
        matcher.take(output_ids)
        return matcher

    def fill(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]], words: NDArray[np.int32]) -> None:
        size = words.shape[1] * words.itemsize
        constrained: list[tuple[LLMatcher, int, list[int]]] = []
        forced: list[tuple[int, AllowedTokens]] = []  # lines of masks with the only tokens that they allow
        line = 0
        for matcher, drafts in wanted:
            free, only = matcher.look_ahead(drafts)
            forced += [(line + place, step) for place, step in only.items()]
            for i, left_out in enumerate(free):
                words[line + i] = _mask(words.shape[1], left_out, other=1)
            if len(free) <= len(drafts) and matcher.matcher is not None:
                constrained.append((matcher.matcher, line + len(free), list(drafts[len(free) :])))
            line += 1 + len(drafts)
        plain = [(matcher, at) for matcher, at, drafts in constrained if not drafts]
        drafted = [each for each in constrained if each[2]]
        if len(plain) == 1:
            plain[0][0].unsafe_compute_mask_ptr(words.ctypes.data + plain[0][1] * size, size)
        elif plain:
            self._threaded().unsafe_compute_mask_ptr(plain, words.ctypes.data, size, len(words))
        if drafted:
            self._threaded().unsafe_compute_mask_ptr_with_draft_token(drafted, words.ctypes.data, size, len(words))
        for line, step in forced:
            words[line] = _mask(words.shape[1], step, other=0)
        for matcher, _ in wanted:
            if matcher.matcher is not None and matcher.matcher.is_error() and not matcher.error:
                matcher.fail()

    def _threaded(self) -> "LLExecutor":
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        return self._executor

    def _future(self, grammar: Grammar) -> "Future[_CompiledGrammar]":
        """The compiled grammar, perhaps not yet done."""
        grammar = replace(grammar, thinking=None) if grammar.thinking is not None else grammar
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
            self._bytes += len(grammar.text)
            while len(self._compiled) > 1 and (len(self._compiled) > MAX_COMPILED or self._bytes > MAX_COMPILED_BYTES):
                dropped, _ = self._compiled.popitem(last=False)
                self._bytes -= len(dropped.text)
        else:
            self._compiled.move_to_end(grammar)
        return future

    def _compile(self, grammar: Grammar) -> _CompiledGrammar:
        """Compiles a grammar. Runs in the compiler's thread."""
        if self._text is None:
            self._read_vocabulary()
        if grammar.kind == "any":
            return _CompiledGrammar(None, None)
        if self._tokenizer is None:
            self._tokenizer = self._of_llguidance()
        matcher = compile_grammar(self._tokenizer, grammar)
        trigger = Trigger(grammar.trigger.encode(), self._vocabulary) if grammar.trigger else None
        return _CompiledGrammar(matcher, trigger)

    def _markers(self, thinking: Thinking) -> ThinkingMarkers:
        """The markers of a budget, whose grammar has been compiled. A model has a few of them."""
        key = (thinking.begin, thinking.end, thinking.answers)
        if key not in self._known_markers:
            tokenizer = self._text
            assert tokenizer is not None, "compiling a grammar reads the vocabulary"
            encode = functools.partial(tokenizer.encode, add_special_tokens=False)
            self._known_markers[key] = ThinkingMarkers(thinking, encode, tokenizer.special_ids)
        return self._known_markers[key]

    def _read_vocabulary(self) -> None:
        tokenizer = self._load()
        known = min(tokenizer.vocab_size, self._vocab_size)
        vocabulary = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (self._vocab_size - known)
        self._vocabulary = vocabulary
        self._text = tokenizer

    def _of_llguidance(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        tokenizer = self._text
        assert tokenizer is not None
        special = sorted(i for i in tokenizer.special_ids.union(self._eos_token_ids) if i < self._vocab_size)
        tokens: Any = _Tokens(tokenizer, self._vocabulary, special, self._eos_token_ids[0])
        return LLTokenizer(tokens, eos_token=self._eos_token_ids)


def _mask(words: int, token_ids: Sequence[int], *, other: int) -> NDArray[np.int32]:
    """A mask of so many words in which these tokens differ from all others, whose bits are `other`."""
    bits = np.full(words * 32, other, np.uint8)
    bits[list(token_ids)] = 1 - other
    mask: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
    return mask


class _Tokens:
    """A tokenizer in llguidance's form."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text that a grammar forces: the model's usual tokens for it."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)
