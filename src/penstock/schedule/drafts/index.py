"""Finds where the last tokens of a text occurred before."""

from array import array
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

GRAM = 3  # equal tokens of a match. If there are several matches, the longest is chosen
PAIR = 2  # equal tokens of the match that is taken if no GRAM matches: the latest
LONGEST = 32  # tokens of a match that are compared
CANDIDATES = 6  # positions that a search compares
LARGEST_TABLE = 16  # bits: 256 KiB
IN_BULK = 64  # tokens from which NumPy is faster than a loop

_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)  # odd, from golden-ratio and MurmurHash3 constants
_WORD = 0xFFFFFFFF


class Match(NamedTuple):
    """Equal tokens end before `position` of the indexed text."""

    position: int
    length: int  # of equal tokens, at most LONGEST


class TokenIndex:
    """Finds earlier places of the same GRAM or PAIR consecutive tokens in a text that grows at its end.

    Position i stands for the tokens before i. Positions whose GRAM has one hash are chained from the latest to the
    earliest. For pairs only the latest position of each hash is kept. Adding a token and searching take constant time.
    An index has 4 bytes a token and two tables of at most 256 KiB.
    """

    __slots__ = ("_heads", "_links", "_pair_table", "_pairs", "_shift", "_table")

    def __init__(self, expected: int) -> None:
        """`expected`: about how many tokens the text will have. More are possible."""
        bits = min(max(expected.bit_length(), 6), LARGEST_TABLE)
        self._shift = 32 - bits
        self._table = np.zeros(1 << bits, np.int32)  # the latest position of each hash; 0: none
        self._heads = self._table.data
        self._pair_table = np.zeros(1 << bits, np.int32)  # the latest position of each hash of a pair; 0: none
        self._pairs = self._pair_table.data
        self._links = array("i", (0,) * GRAM)  # from each position to the one before it with the same hash; 0: none

    @property
    def end(self) -> int:
        """The position up to which the text is indexed."""
        return len(self._links) - 1

    def extend(self, tokens: Items[int], end: int) -> None:
        """Index the text's positions up to `end`, which is at most its length."""
        start = len(self._links)
        if end < start:
            return
        if end - start >= IN_BULK:
            self._extend_in_bulk(tokens[start - GRAM : end], start)
            return
        heads, pairs, links, shift = self._heads, self._pairs, self._links, self._shift
        p, q, r = _FACTORS
        for i in range(start, end + 1):
            pair = tokens[i - 2] * q + tokens[i - 1] * r
            pairs[(pair & _WORD) >> shift] = i
            slot = ((tokens[i - 3] * p + pair) & _WORD) >> shift
            links.append(heads[slot])
            heads[slot] = i

    def _extend_in_bulk(self, tokens: Items[int], start: int) -> None:
        """`tokens` begin GRAM before position `start`."""
        ids = np.array(tokens, np.uint32)
        p, q, r = (np.uint32(factor) for factor in _FACTORS)
        pairs = ids[1:-1] * q + ids[2:] * r
        # If a hash occurs several times, NumPy stores its positions in their order, so the last one stays.
        self._pair_table[pairs >> np.uint32(self._shift)] = np.arange(start, start + len(pairs), dtype=np.int32)
        slots = (ids[:-2] * p + pairs) >> np.uint32(self._shift)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        again = ordered[1:] == ordered[:-1]
        links = self._table[slots]
        links[order[1:][again]] = order[:-1][again] + start
        last = np.append(~again, True)
        self._table[ordered[last]] = order[last] + start
        self._links.frombytes(links.tobytes())

    def find(self, text: Items[int], tokens: Items[int], after: int) -> Match | None:
        """Returns the position in `text` before which most tokens equal the last of `tokens`; None if fewer than PAIR.

        `text` is the indexed text. Of several positions with equally many tokens, it is the first from `after` on, or
        the latest if all are before `after`. If only PAIR tokens are equal, it is the latest.
        """
        end = len(tokens)
        if end < GRAM:
            return None
        p, q, r = _FACTORS
        pair = tokens[end - 2] * q + tokens[end - 1] * r
        position = self._heads[((tokens[end - 3] * p + pair) & _WORD) >> self._shift]
        best = Match(0, 0)
        for _ in range(CANDIDATES):
            if not position:
                break
            length = _equal(text, position, tokens, end)
            if length > best.length or (length == best.length and position >= after):
                best = Match(position, length)
            position = self._links[position]
        if best.length >= GRAM:
            return best
        position = self._pairs[(pair & _WORD) >> self._shift]
        if position and text[position - 1] == tokens[end - 1] and text[position - 2] == tokens[end - 2]:
            return Match(position, PAIR)
        return None


def _equal(text: Items[int], position: int, tokens: Items[int], end: int) -> int:
    """How many tokens before `position` equal those before `end`, at most LONGEST."""
    most = min(position, end, LONGEST)
    for length in range(1, most + 1):
        if text[position - length] != tokens[end - length]:
            return length - 1
    return most
