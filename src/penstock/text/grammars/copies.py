"""A sequence's copy of a compiled grammar, within limits of its work.

llguidance counts the distinct items of its parser, but an ambiguous grammar finds each of them many times. So the
processor time is limited, too: all sequences wait for the masks of a step.

The copies of a grammar share its lexer, which makes states as texts need them. When it has too many, or a text was too
hard for it, it fails for every copy, and for later ones. Then the grammar is compiled anew, and each copy follows its
output once more.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.messages import GRAMMAR_TOO_COMPLEX
from penstock.text.grammars.compile import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Seconds of processor time. A mask usually takes 0.05 ms. What honest grammars took most for: 26 ms for a schema of 800
# properties that are not required, 20 ms for a constant of 4,000 characters.
SEQUENCE_SECONDS = 0.05  # that a sequence may use
TOKEN_SECONDS = 0.004  # that each token gives back
GRAMMAR_SECONDS = 0.1  # for one mask or token, after which no sequence may use the grammar
RENEW_SECONDS = 0.1  # to compile a grammar anew, and to follow an output once more
RENEW_TOKENS = 64  # between two of these for one sequence

_LEXER_FAILED = re.compile("lexer error|fails parse")
_MUCH_WORK = re.compile("lexer error| items")
_REFUSED = "doesn't satisfy the grammar"  # of a token that the grammar does not have
_OUT_OF_TIME = (
    f"{GRAMMAR_TOO_COMPLEX}: the limit of its processor time is {1e3 * SEQUENCE_SECONDS:g} ms, and "
    f"{1e3 * TOKEN_SECONDS:g} ms more for each token"
)


@dataclass(eq=False, slots=True)
class CompiledGrammar:
    matcher: "LLMatcher"  # before the first token
    seconds: float  # to compile it
    refusal: str = ""  # why no sequence may use it any more


Renew = Callable[[CompiledGrammar], CompiledGrammar | None]


class GrammarCopy:
    """Follows one output through a grammar."""

    __slots__ = ("_compiled", "_matcher", "_renew", "_renewed_at", "_spent", "_taken", "error")

    def __init__(self, compiled: CompiledGrammar, renew: Renew) -> None:
        """`renew` compiles the grammar anew in place of one whose lexer has failed. It returns None if that takes too
        long."""
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._renew = renew
        self._taken: list[int] = []
        self._renewed_at = -RENEW_TOKENS  # the number of tokens then
        self._spent = 0.0
        self.error = compiled.refusal or first_line(self._matcher.get_error())  # why it cannot go on; empty: it can

    def compute(self, address: int, size: int, drafts: list[int]) -> None:
        """Writes the masks of the next token and of those after each draft, `size` bytes each. Any thread may call."""
        if self._compiled.refusal:
            self._fail(self._compiled.refusal)
            return
        self._compute(address, size, drafts)
        if self._lexer_failed() and self._renewed():
            self._compute(address, size, drafts)
        if self._matcher.is_error():
            self._fail(GRAMMAR_TOO_COMPLEX)

    def consume(self, token_id: int) -> None:
        """Goes on by a token of the output."""
        self._spent = max(self._spent - TOKEN_SECONDS, 0.0)
        if not self._consume(token_id) and not (self._lexer_failed() and self._renewed() and self._consume(token_id)):
            refused = _REFUSED in self._matcher.get_error()  # else the grammar has met a limit of the library
            what = f"the request's grammar cannot be followed beyond token {token_id}"
            self._fail(what if refused else GRAMMAR_TOO_COMPLEX)
        self._taken.append(token_id)

    def forced(self) -> Sequence[int]:
        """The usual tokens of the text that must come next, as far as nothing else may."""
        began = time.thread_time()
        tokens = self._matcher.compute_ff_tokens()
        self._spend(time.thread_time() - began)
        return tokens

    def _compute(self, address: int, size: int, drafts: list[int]) -> None:
        matcher: Any = self._matcher  # its stub lacks the function for drafts
        began = time.thread_time()
        if drafts:
            matcher.unsafe_compute_mask_ptr_with_draft_token(address, size, drafts)
        else:
            matcher.unsafe_compute_mask_ptr(address, size)
        self._spend(time.thread_time() - began)

    def _consume(self, token_id: int) -> bool:
        began = time.thread_time()
        consumed = self._matcher.consume_token(token_id)
        self._spend(time.thread_time() - began)
        return consumed

    def _spend(self, seconds: float) -> None:
        """Counts processor time of this thread, to which other work on the machine adds nothing."""
        self._spent += seconds
        if self._spent > SEQUENCE_SECONDS:
            self.error = self.error or _OUT_OF_TIME
        if seconds > GRAMMAR_SECONDS:
            self._compiled.refusal = f"{GRAMMAR_TOO_COMPLEX}: it took {seconds:.2f} s of processor time for one token"

    def _fail(self, what: str) -> None:
        reason = first_line(self._matcher.get_error())
        if _MUCH_WORK.search(reason):
            what = GRAMMAR_TOO_COMPLEX
        self.error = self.error or (f"{what}: {reason}" if reason else what)

    def _lexer_failed(self) -> bool:
        return not self.error and _LEXER_FAILED.search(self._matcher.get_error()) is not None

    def _renewed(self) -> bool:
        """Follows the output once more, in the grammar compiled anew. False if that takes too long."""
        if len(self._taken) < self._renewed_at + RENEW_TOKENS:
            return False
        compiled = self._renew(self._compiled)
        if compiled is None:
            return False
        self._compiled, self._renewed_at = compiled, len(self._taken)
        self._matcher = compiled.matcher.deep_copy()
        end = time.thread_time() + RENEW_SECONDS
        return all(self._matcher.consume_token(token_id) and time.thread_time() < end for token_id in self._taken)
