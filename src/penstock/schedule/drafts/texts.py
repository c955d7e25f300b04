"""Texts that drafts are taken from: the sequence itself, its prediction, and recent outputs of the same tenant."""

from array import array
from collections.abc import Sequence as Line

from penstock.schedule.drafts.index import GRAM, TokenIndex

SEPARATOR = 2**31 - 1  # between outputs; no token has this id
OUTPUT_TOKENS = 4096  # that are kept of one output
TENANT_TOKENS = 32768  # that are kept of one tenant's outputs
TENANTS = 32
SURE = 8  # tokens matched, from which a single other token is taken for a replacement


class RecentOutputs:
    """The latest outputs of one tenant, one after the other. The older half goes when it is full."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self.index = TokenIndex(TENANT_TOKENS)
        self.epoch = 0  # changes when positions do

    def add(self, output: Line[int]) -> None:
        """Keep an output that has ended."""
        self.tokens.extend((*output[-OUTPUT_TOKENS:], SEPARATOR))
        if len(self.tokens) > TENANT_TOKENS:
            self.tokens = self.tokens[-TENANT_TOKENS // 2 :]
            self.index = TokenIndex(TENANT_TOKENS)
            self.epoch += 1
        self.index.extend(self.tokens, len(self.tokens))


class DraftCursor:
    """A place in another text that a sequence's tokens have followed so far: the text's next tokens are drafts.

    The place is kept while tokens match. A token that differs after a long match is taken for a replacement, and the
    place moves on by one. If the next ones differ too, the place is searched anew.
    """

    __slots__ = ("_place", "epoch", "index", "matched", "position", "tokens")

    def __init__(self, tokens: Line[int], index: TokenIndex, position: int = -1) -> None:
        self.tokens, self.index = tokens, index
        self.position = position  # -1: none
        self.matched = 0  # tokens before it that are equal
        self.epoch = 0
        self._place = max(position, 0)  # where it was lost

    def follow(self, token: int) -> bool:
        """Move on by the sequence's next token. Returns True when the text foretold it."""
        tokens, position, lost = self.tokens, self.position, self._place
        if position < 0:
            return False
        if position < len(tokens) and tokens[position] == token:
            self.position = position + 1
            self.matched += 1
            return True
        if not self.matched and position == lost + 1 and tokens[lost] == token:
            self.position, self.matched = lost + 1, 1  # the token before was inserted, not put in the place of another
            return True
        self._place = position
        self.position = position + 1 if self.matched >= SURE and position < len(tokens) else -1
        self.matched = 0
        return False

    def search(self, sequence: Line[int]) -> None:
        """Search the place anew when few tokens match."""
        if self.matched >= GRAM:
            return
        found = self.index.find(self.tokens, sequence, self._place)
        if found is not None and found.position < len(self.tokens):
            self.position, self.matched = found

    def move_to(self, recent: RecentOutputs) -> None:
        """Follow what the text has become."""
        self.tokens, self.index, self.epoch = recent.tokens, recent.index, recent.epoch
        self.position, self.matched, self._place = -1, 0, 0

    def lose(self) -> None:
        """Forget the place."""
        self.position, self.matched = -1, 0

    def drafts(self, count: int) -> list[int]:
        """At most `count` tokens that follow the place."""
        drafts = list(self.tokens[self.position : self.position + count])
        return drafts[: drafts.index(SEPARATOR)] if SEPARATOR in drafts else drafts


class OwnCursor(DraftCursor):
    """A place in the sequence's own tokens. Tokens that repeat go on repeating."""

    __slots__ = ()

    def drafts(self, count: int) -> list[int]:
        drafts = list(self.tokens[self.position : self.position + count])
        period = len(drafts)
        while 0 < len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts
