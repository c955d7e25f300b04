"""Follows outputs through their grammars in the engine, and computes which tokens are allowed next.

llguidance computes the masks, several at once on threads. A grammar is compiled once, on a thread of its own; then each
sequence gets a copy, which takes microseconds. The first grammar loads llguidance and the tokenizer.
"""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.messages import Grammar, Thinking
from penstock.text.grammars.compile import compile_grammar
from penstock.text.grammars.copies import RENEW_SECONDS, CompiledGrammar, GrammarCopy
from penstock.text.grammars.guarded import GuardedCopy
from penstock.text.grammars.lanes import Lanes
from penstock.text.grammars.masks import MaskJob, MaskThreads
from penstock.text.grammars.thinking import AllowedTokens, Thinker, ThinkingMarkers
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_COMPILED = 64  # grammars that are kept; one has at most 20,000 states of about 2 kB
MAX_COMPILED_BYTES = 1 << 20  # of the texts of these grammars
MAX_THREADS = 8  # that compute masks
LARGE = 8 << 10  # bytes of a schema or expression from which on it may be slow, as one in Lark may always be


class Trigger:
    """The text after which a grammar applies, such as the start of a tool call. Any text may come before it.

    A token may complete the trigger and have more text after it. The grammar could not check that text, so such tokens
    are forbidden where they would complete the trigger.
    """

    def __init__(self, text: bytes, vocabulary: Sequence[bytes]) -> None:
        self.text = text
        # Index i: the tokens that overshoot, if the output ends with the trigger's first i bytes.
        self._overshoots: list[list[int]] = [[] for _ in text]
        for token_id, token in enumerate(vocabulary):
            at = token.find(text)
            if 0 <= at < len(token) - len(text):
                self._overshoots[0].append(token_id)
            for known in range(1, len(text)):
                rest = text[known:]
                if len(token) > len(rest) and token.startswith(rest):
                    self._overshoots[known].append(token_id)

    def forbidden(self, tail: bytes) -> list[int]:
        """Returns the tokens that are not allowed after an output that ends with `tail`."""
        known = (i for i in range(len(self.text)) if tail.endswith(self.text[:i]))
        return [token_id for i in known for token_id in self._overshoots[i]]


class _PreparedGrammar(NamedTuple):
    compiled: CompiledGrammar | None  # None: any text is allowed
    trigger: Trigger | None  # None: the grammar applies from the first token


class GrammarMatcher:
    """Follows one output: a Matcher of runtime/sampling/grammar_rows.py, which describes the methods."""

    __slots__ = ("_ended", "_stops", "_tail", "_thinker", "_trigger", "_vocabulary", "grammar")

    def __init__(
        self,
        grammar: GrammarCopy | GuardedCopy | None,
        trigger: Trigger | None,
        vocabulary: Sequence[bytes],
        stops: frozenset[int],
        thinker: Thinker | None,
    ) -> None:
        """Without a grammar, any text is allowed."""
        self.grammar = grammar
        self._trigger = trigger  # None once the output has it
        self._vocabulary = vocabulary
        self._stops = stops if grammar is not None else frozenset[int]()  # without a grammar nothing ends
        self._thinker = thinker
        self._tail = b""  # the end of the output, which may have a part of the trigger
        self._ended = False

    @property
    def error(self) -> str:
        return "" if self.grammar is None else self.grammar.settle()

    def free(self, tokens: int) -> bool:
        if self._ended:
            return True
        if self._thinker is not None and not self._thinker.free(tokens):
            return False
        if self._trigger is None:
            return self.grammar is None
        return not tokens and (self._ignored(self._trigger, self._thinker) or not self._trigger.forbidden(self._tail))

    @staticmethod
    def _ignored(trigger: Trigger, thinker: Thinker | None) -> bool:
        """Whether the trigger has no effect now: the text of a tool call within reasoning is no tool call."""
        return thinker is not None and thinker.on and trigger.text != thinker.end_marker

    def look_ahead(self, drafts: Sequence[int]) -> tuple[list[list[int]], dict[int, AllowedTokens]]:
        """Looks at the next token and at the one after each draft: positions 0 to len(drafts).

        Returns two things. The first is a list of the forbidden tokens of each position, up to the first one where the
        grammar applies: the grammar's mask is computed from there on. The second has the only allowed tokens of each
        position at which reasoning must end.
        """
        free: list[list[int]] = []
        only: dict[int, AllowedTokens] = {}
        trigger, tail, ended, held = self._trigger, self._tail, self._ended, False  # held: the grammar applies
        thinker = None if self._thinker is None else self._thinker.copy()
        for place, token_id in enumerate((*drafts, -1)):
            if thinker is not None and thinker.allowed is not None and not ended:
                only[place] = thinker.allowed
            ignored = trigger is None or self._ignored(trigger, thinker)
            held = held or (trigger is None and self.grammar is not None and not ended)
            if not held:
                free.append([] if trigger is None or ignored or ended else trigger.forbidden(tail))
            elif thinker is None:
                break
            text = self._bytes_of(token_id)
            if thinker is not None:
                thinker.take(text)
            if trigger is not None and not ignored:
                text = tail + text
                trigger, tail = (None, b"") if text.endswith(trigger.text) else (trigger, text[-len(trigger.text) :])
                if trigger is None and thinker is not None:
                    thinker.answer()
            ended = ended or token_id in self._stops
        return free, only

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._ended or (self.grammar is not None and self.grammar.error):
                return
            trigger = self._trigger
            ignored = trigger is not None and self._ignored(trigger, self._thinker)
            if self._thinker is not None:
                self._thinker.take(self._bytes_of(token_id))
            if trigger is not None:
                if not ignored:
                    self._search(trigger, token_id)
            elif self.grammar is not None:
                self.grammar.consume(token_id)
            self._ended = token_id in self._stops

    def forced(self) -> Sequence[int]:
        held = self._trigger is None and not (self._ended or self.error)
        if not held or self.grammar is None or (self._thinker is not None and not self._thinker.free(0)):
            return ()
        tokens = self.grammar.forced()
        return () if self._stops.intersection(tokens) else tokens

    def _search(self, trigger: Trigger, token_id: int) -> None:
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
    """Compiles grammars and computes masks: the Grammars of runtime/sampling/grammar_rows.py."""

    def __init__(
        self, load: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int], *, threads: int
    ) -> None:
        """`load` returns the model's tokenizer. `vocab_size` is the width of the logits. At most `threads` threads
        compute masks."""
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._stops = frozenset(eos_token_ids)
        self._threads = max(1, min(threads, MAX_THREADS))
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._compiled: OrderedDict[Grammar, Future[_PreparedGrammar]] = OrderedDict()
        self._bytes = 0  # of the texts of compiled grammars
        self._renewing = threading.Lock()
        self._vocabulary: list[bytes] = []
        self._text: Tokenizer | None = None  # the model's tokenizer
        self._tokenizer: LLTokenizer | None = None  # the same for llguidance
        self._lanes: Lanes | None = None  # for grammars that may be slow
        self._known_markers: dict[tuple[str, str, tuple[str, ...]], ThinkingMarkers] = {}
        self._masks = MaskThreads(self._threads)

    def prepare(self, grammar: Grammar) -> bool:
        return self._future(grammar).done()

    def matcher(self, grammar: Grammar, output_ids: Sequence[int]) -> GrammarMatcher:
        compiled, trigger = self._future(grammar).result()
        thinker = None
        if grammar.thinking is not None:
            strict = compiled is not None and trigger is None
            thinker = Thinker(self._markers(grammar.thinking), grammar.thinking, strict=strict)
        copy = None if compiled is None else self._copy(grammar, compiled)
        matcher = GrammarMatcher(copy, trigger, self._vocabulary, self._stops, thinker)
        matcher.take(output_ids)
        return matcher

    def _copy(self, grammar: Grammar, compiled: CompiledGrammar) -> GrammarCopy | GuardedCopy:
        copy = GrammarCopy(compiled, functools.partial(self._renew, grammar))
        if grammar.kind != "lark" and len(grammar.text) < LARGE:
            return copy
        if self._lanes is None:
            assert self._tokenizer is not None, "compiling a grammar makes it"
            self._lanes = Lanes(self._threads, self._tokenizer)
        return GuardedCopy(copy, self._lanes, -(-self._vocab_size // 32))

    def fill(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]], words: NDArray[np.int32]) -> None:
        jobs: list[MaskJob] = []
        forced: list[tuple[int, AllowedTokens]] = []  # lines of masks with the only tokens that they allow
        line = 0
        for matcher, drafts in wanted:
            free, only = matcher.look_ahead(drafts)
            forced += [(line + place, step) for place, step in only.items()]
            for i, forbidden in enumerate(free):
                words[line + i] = _mask(words.shape[1], forbidden, other=1)
            if len(free) <= len(drafts) and matcher.grammar is not None:
                jobs.append(MaskJob(matcher.grammar, line + len(free), list(drafts[len(free) :])))
            line += 1 + len(drafts)
        self._masks.fill(jobs, words)
        for line, step in forced:
            words[line] = _mask(words.shape[1], step, other=0)

    def close(self) -> None:
        self._compiler.shutdown(cancel_futures=True)
        self._masks.close()
        if self._lanes is not None:
            self._lanes.close()

    def _future(self, grammar: Grammar) -> "Future[_PreparedGrammar]":
        """Returns the compiled grammar, which may not be done yet. Starts to compile a new one."""
        grammar = replace(grammar, thinking=None) if grammar.thinking is not None else grammar
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._compiler.submit(self._compile, grammar)
            self._bytes += len(grammar.text)
            while len(self._compiled) > 1 and (len(self._compiled) > MAX_COMPILED or self._bytes > MAX_COMPILED_BYTES):
                self._forget(next(iter(self._compiled)))
        else:
            self._compiled.move_to_end(grammar)
        return future

    def _forget(self, grammar: Grammar) -> None:
        del self._compiled[grammar]
        self._bytes -= len(grammar.text)

    def _compile(self, grammar: Grammar) -> _PreparedGrammar:
        """Compiles a grammar. Runs on the compiler's thread."""
        if self._text is None:
            self._read_vocabulary()
        if grammar.kind == "any":
            return _PreparedGrammar(None, None)
        if self._tokenizer is None:
            self._tokenizer = self._make_llguidance_tokenizer()
        trigger = Trigger(grammar.trigger.encode(), self._vocabulary) if grammar.trigger else None
        return _PreparedGrammar(self._timed(self._tokenizer, grammar), trigger)

    @staticmethod
    def _timed(tokenizer: "LLTokenizer", grammar: Grammar) -> CompiledGrammar:
        began = time.thread_time()
        matcher = compile_grammar(tokenizer, grammar)
        return CompiledGrammar(matcher, time.thread_time() - began, ambiguous=grammar.kind == "lark")

    def _renew(self, grammar: Grammar, failed: CompiledGrammar) -> CompiledGrammar | None:
        """Compiles a grammar again after its lexer has failed, for this sequence and later ones. Returns None if that
        takes too long: then the next sequence that needs it compiles it. Runs on the threads of masks."""
        grammar = replace(grammar, thinking=None)
        with self._renewing:
            future = self._compiled.get(grammar)
            if future is not None:
                if not future.done():
                    return None
                if future.result().compiled is not failed:
                    return future.result().compiled
                self._forget(grammar)
            if failed.seconds > RENEW_SECONDS or self._tokenizer is None:
                return None
            compiled = self._timed(self._tokenizer, grammar)
            if future is not None:
                renewed: Future[_PreparedGrammar] = Future()
                renewed.set_result(_PreparedGrammar(compiled, future.result().trigger))
                self._compiled[grammar] = renewed
                self._bytes += len(grammar.text)
            return compiled

    def _markers(self, thinking: Thinking) -> ThinkingMarkers:
        """Returns the markers of a thinking budget. Its grammar must be compiled, which loads the tokenizer."""
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

    def _make_llguidance_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        tokenizer = self._text
        assert tokenizer is not None
        special = sorted(i for i in tokenizer.special_ids.union(self._eos_token_ids) if i < self._vocab_size)
        tokens: Any = _Tokens(tokenizer, self._vocabulary, special, self._eos_token_ids[0])
        return LLTokenizer(tokens, eos_token=self._eos_token_ids)


def _mask(words: int, token_ids: Sequence[int], *, other: int) -> NDArray[np.int32]:
    """Returns a mask of `words` words. The bits of `token_ids` are 1 - other, and all others are `other`."""
    bits = np.full(words * 32, other, np.uint8)
    bits[list(token_ids)] = 1 - other
    mask: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
    return mask


class _Tokens:
    """A tokenizer with the attributes that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the model's tokens for a text that a grammar forces."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)
