"""Keeps the texts of special tokens in a message from becoming these tokens.

Else whoever writes a message, or a web page that a tool returns, could end its turn and forge one of the system.
"""

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

_START = 2  # characters by which texts are found


class MarkerTexts:
    """Finds the texts of special tokens, of which a vocabulary may have thousands."""

    def __init__(self, texts: Collection[str]) -> None:
        # A token of one character, or of blanks, is no marker: text has it without any intent.
        self._texts = frozenset(text for text in texts if len(text) >= _START and not text.isspace())
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[:_START], set()).add(len(text))
        self._lengths = {start: sorted(each, reverse=True) for start, each in lengths.items()}
        self._starts = re.compile("|".join(map(re.escape, lengths)) or r"(?!)")

    def broken(self, value: Any, mark: str) -> Any:
        """Returns JSON with `mark` after the first character of each such text."""
        if isinstance(value, str):
            return value if self._starts.search(value) is None else self._broken_text(value, mark)
        if isinstance(value, list | tuple):
            return [self.broken(item, mark) for item in value]
        if isinstance(value, Mapping):
            return {self.broken(key, mark): self.broken(item, mark) for key, item in value.items()}
        return value

    def _broken_text(self, text: str, mark: str) -> str:
        parts: list[str] = []
        done = at = 0
        while (found := self._starts.search(text, at)) is not None:
            at = found.start()
            longest = next((n for n in self._lengths[found[0]] if text[at : at + n] in self._texts), 0)
            if longest:
                parts += (text[done : at + 1], mark)
                done = at + 1
            at += longest or 1
        return "".join((*parts, text[done:])) if parts else text


def new_mark() -> str:
    """Returns a text that no message contains, and that templates do not change: they may change letters' case."""
    return f"#{secrets.randbelow(10**24):024}#"
