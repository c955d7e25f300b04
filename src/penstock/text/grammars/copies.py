"""A sequence's copy of a compiled grammar, with a limit on its processor time.

A slow grammar delays every sequence, since a step needs all its masks. llguidance limits the number of distinct parser
items, but an ambiguous grammar may find each item many times. So processor time is limited, too.

The copies of a grammar share its lexer, which adds states as texts need them. If it reaches its limit of states, or
fails on a text, it fails for all copies, also for later ones. Then the grammar is compiled again (renewed), and each
copy replays its output.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.messages import GRAMMAR_TOO_COMPLEX
from penstock.text.grammars.compile import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Seconds of processor time. A mask usually takes 0.05 ms. The slowest measured for realistic grammars: 26 ms for a
# schema of 800 optional properties, 20 ms for a constant of 4,000 characters.
SEQUENCE_SECONDS = 0.05  # the budget of a sequence
TOKEN_SECONDS = 0.004  # each token adds so much to the budget again
# The same for all sequences of a grammar that may be ambiguous. They share its lexer, so that one waits for the other.
# The most measured for realistic ones: 3 ms for eight outputs in SQL.
AMBIGUOUS_SECONDS, AMBIGUOUS_TOKEN_SECONDS = 0.02, 0.001
GRAMMAR_SECONDS = 0.1  # if one mask or token takes longer, the grammar is refused for all sequences
RENEW_SECONDS = 0.1  # the limit for compiling a grammar again, and for replaying an output
RENEW_TOKENS = 64  # the least number of tokens between two renewals for one sequence

_LEXER_FAILED = re.compile("lexer error|fails parse")
_REFUSED = "doesn't satisfy the grammar"  # llguidance's error for a token that the grammar does not allow
_OUT_OF_TIME = GRAMMAR_TOO_COMPLEX + ": the limit of its processor time is {:g} ms, and {:g} ms more for each token"


@dataclass(eq=False, slots=True)
class CompiledGrammar:
    matcher: "LLMatcher"  # in its first state: sequences get copies
    seconds: float  # that compiling took
    ambiguous: bool = False  # it may be
    refusal: str = ""  # why no sequence may use it any more; empty if they may
    spent: float = 0.0  # seconds of the budget of all sequences

    @property
    def budget(self) -> tuple[float, float]:
        """Seconds at first, and for each token."""
        if self.ambiguous:
            return AMBIGUOUS_SECONDS, AMBIGUOUS_TOKEN_SECONDS
        return SEQUENCE_SECONDS, TOKEN_SECONDS


Renew = Callable[[CompiledGrammar], CompiledGrammar | None]


class LibraryCalls(NamedTuple):
    """How llguidance is called."""

    clock: Callable[[], float]  # the processor time of what calls it
    consume: Callable[["LLMatcher", int], bool]  # consumes a token
    compute: Callable[["LLMatcher", int, int, list[int]], None]  # writes masks, as GrammarCopy.compute does


def _compute(matcher: Any, address: int, size: int, drafts: list[int]) -> None:  # its stub lacks a function
    if drafts:
        matcher.unsafe_compute_mask_ptr_with_draft_token(address, size, drafts)
    else:
        matcher.unsafe_compute_mask_ptr(address, size)


_DIRECT = LibraryCalls(time.thread_time, lambda matcher, token_id: matcher.consume_token(token_id), _compute)


class GrammarCopy:
    """Follows one output through a grammar."""

    __slots__ = ("_compiled", "_matcher", "_renew", "_renewed_at", "_taken", "began", "calls", "error", "spent")

    def __init__(self, compiled: CompiledGrammar, renew: Renew) -> None:
        """`renew` returns a new compiled grammar in place of one whose lexer has failed, or None if that takes too
        long."""
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._renew = renew
        self._taken: list[int] = []  # the output's tokens
        self._renewed_at = -RENEW_TOKENS  # the number of tokens at the last renewal
        self.spent = 0.0  # seconds of the sequence's budget
        self.calls = _DIRECT
        self.began = 0.0  # the processor time when the running call began
        self.error = compiled.refusal or first_line(self._matcher.get_error())  # empty if the output can continue

    def compute(self, address: int, size: int, drafts: list[int]) -> None:
        """Writes the masks of the next token and of the one after each draft, `size` bytes each, to `address`. May be
        called on any thread."""
        if self._compiled.refusal:
            self._fail(self._compiled.refusal)
            return
        self._compute(address, size, drafts)
        if self._lexer_failed():
            if self._renewed():
                self._compute(address, size, drafts)
            else:
                self._fail(GRAMMAR_TOO_COMPLEX)  # the new copy may be behind the output
        if self._matcher.is_error():
            self._fail(GRAMMAR_TOO_COMPLEX)

    def consume(self, token_id: int) -> None:
        """Advances by a token of the output."""
        if self.refused:  # another output of the grammar may keep its lexer locked
            self._fail(self._compiled.refusal)
            return
        account = self._account
        account.spent = max(account.spent - self._compiled.budget[1], 0.0)
        if not self._consume(token_id) and not (self._lexer_failed() and self._renewed() and self._consume(token_id)):
            refused = _REFUSED in self._matcher.get_error()  # else the grammar has met a limit of the library
            what = f"the request's grammar cannot be followed beyond token {token_id}"
            self._fail(what if refused else GRAMMAR_TOO_COMPLEX)
        self._taken.append(token_id)

    def forced(self) -> Sequence[int]:
        """Returns the tokens of the only text that the grammar allows next; empty if there is a choice."""
        self.began = self.calls.clock()
        tokens = self._matcher.compute_ff_tokens()
        self._spend()
        return tokens

    @property
    def _account(self) -> "CompiledGrammar | GrammarCopy":
        """What has the budget."""
        return self._compiled if self._compiled.ambiguous else self

    def settle(self) -> str:
        """Returns `error`, in which every token so far counts."""
        return self.error

    @property
    def refused(self) -> bool:
        """Whether no sequence may use the grammar any more."""
        return bool(self._compiled.refusal)

    def refuse(self, seconds: float) -> None:
        """Refuses the grammar for all sequences, since it took so many seconds of processor time for one token."""
        self._compiled.refusal = f"{GRAMMAR_TOO_COMPLEX}: it took {seconds:.2f} s of processor time for one token"
        self.error = self.error or self._compiled.refusal

    def _compute(self, address: int, size: int, drafts: list[int]) -> None:
        self.began = self.calls.clock()
        self.calls.compute(self._matcher, address, size, drafts)
        self._spend()

    def _consume(self, token_id: int) -> bool:
        self.began = self.calls.clock()
        consumed = self.calls.consume(self._matcher, token_id)
        self._spend()
        return consumed

    def _spend(self) -> None:
        """Counts the processor time of a call, which does not depend on other work on the machine."""
        seconds = self.calls.clock() - self.began
        account, (first, each) = self._account, self._compiled.budget
        account.spent += seconds
        if account.spent > first:
            self.error = self.error or _OUT_OF_TIME.format(1e3 * first, 1e3 * each)
            if account is self._compiled:
                self._compiled.refusal = self.error
        if seconds > GRAMMAR_SECONDS:
            self.refuse(seconds)

    def _fail(self, what: str) -> None:
        """Sets `error`, with llguidance's reason. The first error stays."""
        reason = first_line(self._matcher.get_error())
        self.error = self.error or (f"{what}: {reason}" if reason else what)

    def _lexer_failed(self) -> bool:
        return not self.error and _LEXER_FAILED.search(self._matcher.get_error()) is not None

    def _renewed(self) -> bool:
        """Renews the grammar and replays the output in it. Returns False if that takes too long."""
        if len(self._taken) < self._renewed_at + RENEW_TOKENS:
            return False
        self.began = self.calls.clock() + RENEW_SECONDS  # so long it may take
        compiled = self._renew(self._compiled)
        if compiled is None:
            return False
        self._compiled, self._renewed_at = compiled, len(self._taken)
        self._matcher = compiled.matcher.deep_copy()
        end = self.began = self.calls.clock() + RENEW_SECONDS
        return all(self.calls.consume(self._matcher, token_id) and self.calls.clock() < end for token_id in self._taken)
