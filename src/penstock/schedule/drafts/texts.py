"""Texts that drafts are taken from: the sequence itself, its prediction, and recent outputs of the same tenant."""

from array import array
from collections.abc import Sequence as Items

from penstock.schedule.drafts.index import GRAM, TokenIndex

SEPARATOR = 2**31 - 1  # between outputs; no token has this id
OUTPUT_TOKENS = 4096  # that are kept of one output
TENANT_TOKENS = 32768  # that are kept of one tenant's outputs
TENANTS = 32
SURE = 8  # tokens matched, from which another token is taken for a change of the text, not for its end
LEFT_OUT = 16  # tokens that a change may leave out


class RecentOutputs:
    """The latest outputs of one tenant, one after the other. The older half goes when it is full."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self.index = TokenIndex(TENANT_TOKENS)
        self.epoch = 0  # changes when positions do

    def add(self, output: Items[int]) -> None:
        """Keep an output that has ended."""
        self.tokens.extend((*output[-OUTPUT_TOKENS:], SEPARATOR))
        if len(self.tokens) > TENANT_TOKENS:
            self.tokens = self.tokens[-TENANT_TOKENS // 2 :]
            self.index = TokenIndex(TENANT_TOKENS)
            self.epoch += 1
        self.index.extend(self.tokens, len(self.tokens))


class DraftCursor:
    """A place in another text that a sequence's tokens have followed so far: the text's next tokens are drafts.

    The place is kept while tokens match. A token that differs after a long match is taken for a change: the text's next
    tokens were left out up to this one, if it is among them, else it replaces one. If the token after it tells that it
    was a replacement or an insertion, the place is moved. Half of the match then counts on. If the next tokens differ
    too, the place is searched anew.
    """

    __slots__ = ("_place", "_trusted", "epoch", "index", "matched", "position", "tokens")

    def __init__(self, tokens: Items[int], index: TokenIndex, position: int = -1) -> None:
        self.tokens, self.index = tokens, index
        self.position = position  # -1: none
        self.matched = 0  # tokens before it that are equal; of those before a change, half
        self._trusted = 0  # of `matched` before the last token, if that was a change
        self.epoch = 0
        self._place = max(position, 0)  # where it was lost

    def follow(self, token: int, at: int) -> bool:
        """Move on by the sequence's next token, its token number `at`. Returns True when the text foretold it."""
        tokens, position, lost = self.tokens, self.position, self._place
        if position < 0:
            return False
        if position < len(tokens) and tokens[position] == token:
            self.position = position + 1
            self.matched += 1 + self._trusted
            self._trusted = 0
            return True
        if self._trusted:  # the token before was a change: was it an insertion or a replacement?
            for place in (lost, lost + 1):
                if place < len(tokens) and tokens[place] == token:
                    self.position, self.matched, self._trusted = place + 1, 1 + self._trusted, 0
                    return True
        self._place = position
        changed = self.matched >= SURE and position < len(tokens)
        self._trusted = self.matched // 2 if changed else 0
        self.position = self._after_change(token, at) if changed else -1
        self.matched = 0
        return False

    def _after_change(self, token: int, at: int) -> int:
        """The place after a token that is not the one at the place."""
        start = self.position + 1
        try:
            return self.tokens.index(token, start, self._end(start, at)) + 1
        except ValueError:
            return start

    def _end(self, start: int, at: int) -> int:
        """Returns the place before which a search that begins at `start` ends."""
        return start + LEFT_OUT

    def search(self, sequence: Items[int]) -> None:
        """Search the place anew when few tokens match."""
        if self.matched >= GRAM:
            return
        found = self.index.find(self.tokens, sequence, self._place)
        # Two equal tokens are often chance, so a place that the cursor has is not given up for them.
        if found is not None and found.position < len(self.tokens) and (found.length >= GRAM or self.position < 0):
            self.position, self.matched = found
            self._trusted = 0

    def move_to(self, recent: RecentOutputs) -> None:
        """Follow what the text has become."""
        self.tokens, self.index, self.epoch = recent.tokens, recent.index, recent.epoch
        self.position, self.matched, self._trusted, self._place = -1, 0, 0, 0

    def lose(self) -> None:
        """Forget the place."""
        self.position, self.matched, self._trusted = -1, 0, 0

    def drafts(self, count: int) -> list[int]:
        """At most `count` tokens that follow the place."""
        drafts = list(self.tokens[self.position : self.position + count])
        return drafts[: drafts.index(SEPARATOR)] if SEPARATOR in drafts else drafts


class OwnCursor(DraftCursor):
    """A place in the sequence's own tokens. Tokens that repeat go on repeating."""

    __slots__ = ()

    def _end(self, start: int, at: int) -> int:
        return min(start + LEFT_OUT, at)  # or it would find the token itself, and follow itself from then on

    def drafts(self, count: int) -> list[int]:
        drafts = list(self.tokens[self.position : self.position + count])
        period = len(drafts)
        while 0 < len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts
