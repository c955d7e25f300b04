"""Finds stop strings in text as it arrives."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first. If several end at the same character, finds the longest.

    This is the automaton of Aho and Corasick (1975). Its state is a number that stands for the longest end of the text
    with which a stop string begins; 0 stands for the empty one. Each character takes amortised constant time for any
    number of stop strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would end every text before it begins."""
        if "" in stop:
            raise ValueError("a stop string is empty; give at least one character or leave it out")
        self._next: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        depth = [0]
        for text in stop:
            state = 0
            for char in text:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._match.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][char]
            self._match[state] = text
        self._fall = [0] * len(self._next)
        # For each state: how many characters at the end of the text may still become a stop string. If a state is the
        # end of a stop string and begins no longer one, only a shorter end of the text may.
        self._hold = [0] * len(self._next)
        self._link(depth)

    def _link(self, depth: list[int]) -> None:
        """Links each state to the state of the next shorter end of the text. Shorter states come first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, after in self._next[state].items():
                queue.append(after)
                self._fall[after] = self.advance(self._fall[state], char)
            shorter = self._fall[state]
            self._match[state] = self._match[state] or self._match[shorter]
            self._hold[state] = depth[state] if self._next[state] else self._hold[shorter]

    def advance(self, state: int, char: str) -> int:
        """Returns the state after one more character."""
        while state and char not in self._next[state]:
            state = self._fall[state]
        return self._next[state].get(char, 0)

    def scan(self, state: int, text: str, start: int) -> tuple[int, int, str | None]:
        """Reads text from `start` until a stop string is complete. Returns (state, its end, stop string or None)."""
        for position in range(start, len(text)):
            state = self.advance(state, text[position])
            if self._match[state] is not None:
                return state, position + 1, self._match[state]
        return state, len(text), None

    def hold(self, state: int) -> int:
        """Returns how many characters at the end of the text must be held back, because they may begin a stop
        string."""
        return self._hold[state]
