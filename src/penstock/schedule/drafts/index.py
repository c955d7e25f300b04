"""Finds where the last tokens of a text occurred before."""

from array import array
from collections.abc import Sequence as Line
from typing import NamedTuple

import numpy as np

GRAM = 3  # tokens that must be equal for a match
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
    """An index of every GRAM consecutive tokens of a text that grows at its end.

    Position i stands for the tokens before i. Positions of equal hash are chained from the latest to the earliest.
    Adding a token and searching take constant time. An index has 4 bytes a token and a table of at most 256 KiB.
    """

    __slots__ = ("_heads", "_links", "_shift", "_table")

    def __init__(self, expected: int) -> None:
        """`expected`: about how many tokens the text will have. More are possible."""
        bits = min(max(expected.bit_length(), 6), LARGEST_TABLE)
        self._shift = 32 - bits
        self._table = np.zeros(1 << bits, np.int32)  # the latest position of each hash; 0: none
        self._heads = self._table.data
        self._links = array("i", (0,) * GRAM)  # from each position to the one before it with the same hash; 0: none

    @property
    def end(self) -> int:
        """The position up to which the text is indexed."""
        return len(self._links) - 1

    def extend(self, tokens: Line[int], end: int) -> None:
        """Index the text's positions up to `end`, which is at most its length."""
        start = len(self._links)
        if end < start:
            return
        if end - start >= IN_BULK:
            self._extend_in_bulk(tokens[start - GRAM : end], start)
            return
        heads, links, shift = self._heads, self._links, self._shift
        p, q, r = _FACTORS
        for i in range(start, end + 1):
            slot = ((tokens[i - 3] * p + tokens[i - 2] * q + tokens[i - 1] * r) & _WORD) >> shift
            links.append(heads[slot])
            heads[slot] = i

    def _extend_in_bulk(self, tokens: Line[int], start: int) -> None:
        """`tokens` begin GRAM before position `start`."""
        ids = np.array(tokens, np.uint32)
        p, q, r = (np.uint32(factor) for factor in _FACTORS)
        slots = (ids[:-2] * p + ids[1:-1] * q + ids[2:] * r) >> np.uint32(self._shift)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        again = ordered[1:] == ordered[:-1]
        links = self._table[slots]
        links[order[1:][again]] = order[:-1][again] + start
        last = np.append(~again, True)
        self._table[ordered[last]] = order[last] + start
        self._links.frombytes(links.tobytes())

    def find(self, text: Line[int], tokens: Line[int], after: int) -> Match | None:
        """The position in `text`, the indexed one, whose tokens before it equal the most of the last of `tokens`.

        Among equally good positions, the first from `after` on is preferred, else the latest.
        """
        end = len(tokens)
        if end < GRAM:
            return None
        p, q, r = _FACTORS
        position = self._heads[
            ((tokens[end - 3] * p + tokens[end - 2] * q + tokens[end - 1] * r) & _WORD) >> self._shift
        ]
        best = Match(0, 0)
        for _ in range(CANDIDATES):
            if not position:
                break
            length = _equal(text, position, tokens, end)
            if length > best.length or (length == best.length and position >= after):
                best = Match(position, length)
            position = self._links[position]
        return best if best.length >= GRAM else None


def _equal(text: Line[int], position: int, tokens: Line[int], end: int) -> int:
    """How many tokens before `position` equal those before `end`, at most LONGEST."""
    most = min(position, end, LONGEST)
    for length in range(1, most + 1):
        if text[position - length] != tokens[end - length]:
            return length - 1
    return most
