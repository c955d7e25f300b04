"""Follows outputs through their grammars, in the engine: which tokens are allowed next.

llguidance computes the masks, several at once in its own threads. A grammar is compiled once, in a thread of its own;
every sequence then gets a copy, which takes microseconds. All of this is loaded by the first grammar.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.messages import Grammar
from penstock.text.grammars.compile import compile_grammar, first_line
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_COMPILED = 64  # grammars that are kept; a state of one takes about 2 kB, and it has at most 20,000
MAX_COMPILED_BYTES = 1 << 20  # of their texts
MAX_THREADS = 8


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


class _Compiled(NamedTuple):
    matcher: "LLMatcher"
    trigger: Trigger | None


class GrammarMatcher:
    """See runtime's Matcher."""

    __slots__ = ("_ended", "_stops", "_tail", "_trigger", "_vocabulary", "error", "matcher")

    def __init__(self, compiled: _Compiled, vocabulary: Sequence[bytes], stops: frozenset[int]) -> None:
        self.matcher = compiled.matcher.deep_copy()
        self.error = first_line(self.matcher.get_error())
        self._trigger = compiled.trigger
        self._vocabulary = vocabulary
        self._stops = stops
        self._tail = b""
        self._ended = False

    @property
    def restricts(self) -> bool:
        return not self._ended and (self._trigger is None or bool(self._trigger.left_out(self._tail)))

    @property
    def left_out(self) -> list[int] | None:
        """The tokens that are not allowed before the trigger; None after it, where the grammar decides."""
        return None if self._trigger is None else self._trigger.left_out(self._tail)

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._ended or self.error:
                return
            if self._trigger is not None:
                self._look(self._trigger, token_id)
            elif not self.matcher.consume_token(token_id):
                self.fail(f"token {token_id} breaks the request's grammar")
            if token_id in self._stops:
                self._ended = True

    def fail(self, what: str = "") -> None:
        """Note that the matcher cannot go on."""
        reason = first_line(self.matcher.get_error())
        self.error = ": ".join(part for part in (what or "the request's grammar is too complex", reason) if part)

    def _look(self, trigger: Trigger, token_id: int) -> None:
        """Look for the trigger in the output."""
        token = self._vocabulary[token_id] if token_id < len(self._vocabulary) else b""
        text = self._tail + token
        if text.endswith(trigger.text):
            self._trigger = None
        else:
            self._tail = text[-len(trigger.text) :]


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
        self._compiled: OrderedDict[Grammar, Future[_Compiled]] = OrderedDict()
        self._bytes = 0
        self._vocabulary: list[bytes] = []
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None

    def prepare(self, grammar: Grammar) -> bool:
        return self._future(grammar).done()

    def matcher(self, grammar: Grammar, output_ids: Sequence[int]) -> GrammarMatcher:
        matcher = GrammarMatcher(self._future(grammar).result(), self._vocabulary, self._stops)
        matcher.take(output_ids)
        return matcher

    def fill(self, matchers: Sequence[GrammarMatcher], words: NDArray[np.int32]) -> None:
        size = words.shape[1] * words.itemsize
        wanted = []
        for line, each in enumerate(matchers):
            left_out = each.left_out
            if left_out is None:
                wanted.append((each, line))
                continue
            mask = np.full(words.shape[1] * 32, 1, np.uint8)
            mask[left_out] = 0
            words[line] = np.packbits(mask, bitorder="little").view(np.int32)
        if len(wanted) == 1:
            ((each, line),) = wanted
            each.matcher.unsafe_compute_mask_ptr(words.ctypes.data + line * size, size)
        elif wanted:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(self._threads)
            pairs = [(each.matcher, line) for each, line in wanted]
            self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, size, len(words))
        for each, _ in wanted:
            if each.matcher.is_error():
                each.fail()

    def _future(self, grammar: Grammar) -> "Future[_Compiled]":
        """The compiled grammar, perhaps not yet done."""
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

    def _compile(self, grammar: Grammar) -> _Compiled:
        """In the compiler's thread."""
        if self._tokenizer is None:
            self._read_vocabulary()
        assert self._tokenizer is not None
        matcher = compile_grammar(self._tokenizer, grammar)
        trigger = Trigger(grammar.trigger.encode(), self._vocabulary) if grammar.trigger else None
        return _Compiled(matcher, trigger)

    def _read_vocabulary(self) -> None:
        from llguidance import LLTokenizer

        tokenizer = self._load()
        known = min(tokenizer.vocab_size, self._vocab_size)
        vocabulary = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (self._vocab_size - known)
        special = sorted(i for i in tokenizer.special_ids.union(self._eos_token_ids) if i < self._vocab_size)
        tokens: Any = _Tokens(tokenizer, vocabulary, special, self._eos_token_ids[0])
        self._tokenizer = LLTokenizer(tokens, eos_token=self._eos_token_ids)
        self._vocabulary = vocabulary


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
