"""Reads text that arrives in pieces. The results do not depend on where the pieces were cut.

A parser is a generator that calls the methods below with `yield from`. Its driver passes each piece to `Cursor.add` and
resumes the generator, which runs until it needs more text. At the end of the text the driver sets `Cursor.ended` and
resumes the generator once more.
"""

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
# A generator that yields each time it needs more text. `yield from` returns its result.
Reading: TypeAlias = Generator[None, None, T]

_OUTSIDE = re.compile(r'[{}\[\]"]')
_IN_STRING = re.compile(r'["\\]')
_BLANKS = re.compile(r"\s*")


class Cursor:
    """A read position in a text of which only a part has arrived. To consume text is to move the position past it.

    If `taken` is a list, every piece of text that is consumed is also appended to it.
    """

    __slots__ = ("_at", "_text", "ended", "taken")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False
        self.taken: list[str] | None = None

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def rest(self) -> int:
        """The number of characters that have arrived but are not consumed yet."""
        return len(self._text) - self._at

    def take(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += count
        if self.taken is not None:
            self.taken.append(text)
        return text

    def up_to(self, markers: "Markers") -> tuple[str, str | None]:
        """Consumes and returns the text before the first marker, and the marker.

        If no marker has arrived, the second result is None. The end of the text then stays if it may be the start of a
        marker, and the rest is consumed.
        """
        found = markers.pattern.search(self._text, self._at)
        if found is not None:
            text = self.take(found.start() - self._at)
            return text, self.take(len(found.group()))
        hold = 0 if self.ended else markers.begun(self._text, self._at)
        return self.take(self.rest - hold), None

    def peek(self) -> Reading[str]:
        """Returns the next character without consuming it, or "" at the end of the text."""
        while not self.rest and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def blanks(self) -> Reading[str]:
        """Consumes whitespace. Returns the character after it without consuming it, or "" at the end of the text."""
        while True:
            char = yield from self.peek()
            if not char or not char.isspace():
                return char
            self.take(1)

    def literal(self, text: str) -> Reading[bool]:
        """Returns True and consumes `text` if it comes next. Otherwise returns False and consumes nothing."""
        while self._text.startswith(text[: self.rest], self._at):
            if self.rest >= len(text):
                self.take(len(text))
                return True
            if self.ended:
                return False
            yield
        return False

    def after_blanks(self, text: str) -> Reading[bool]:
        """Consumes whitespace, then `text` if it comes next. Returns True if it did."""
        yield from self.blanks()
        return (yield from self.literal(text))

    def followed_by(self, texts: Sequence[str], blanks: int) -> Reading[bool]:
        """Returns True if one of `texts`, or the end of the text, comes next, after at most so many blanks. Consumes
        nothing."""
        while True:
            found = _BLANKS.match(self._text, self._at)
            start = self._at if found is None else found.end()
            rest = self._text[start : start + max(map(len, texts))]
            if start - self._at > blanks or any(rest.startswith(text) for text in texts):
                return start - self._at <= blanks
            if self.ended or not any(text.startswith(rest) for text in texts):
                return any(text.startswith(rest) for text in texts)
            yield

    def before(self, ends: "Markers", limit: int) -> Reading[str | None]:
        """Consumes and returns the text before the first of `ends`. The end itself is not consumed.

        Returns None and consumes nothing if no end begins within `limit` characters, or if the text is over before.
        """
        while True:
            found = ends.pattern.search(self._text, self._at)
            if found is not None and found.start() - self._at <= limit:
                return self.take(found.start() - self._at)
            if found is not None or self.ended or self.rest > limit + ends.longest:
                return None
            yield

    def json_string(self, limit: int) -> Reading[str | None]:
        """Consumes a JSON string and returns it as written, with its quotes and escapes.

        Returns None if no string comes next, if it has more than `limit` characters with its quotes, or if the text
        ends inside it. What was read of the string is then consumed.
        """
        if (yield from self.peek()) != '"':
            return None
        parts = [self.take(1)]
        length, escaped = 1, False
        while length <= limit:
            if not (yield from self.peek()):
                return None
            at = self._at
            if not escaped:
                found = _IN_STRING.search(self._text, at)
                at = len(self._text) if found is None else found.start()
            piece = self.take(min(at + 1 - self._at, self.rest, limit + 1 - length))
            parts.append(piece)
            length += len(piece)
            ends = piece[-1]
            if not escaped and ends == '"' and length <= limit:
                return "".join(parts)
            escaped = not escaped and ends == "\\"
        return None

    def json_container(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Consumes the JSON object or array that comes next, and passes each piece to `emit` as soon as it arrives.

        Returns True at the bracket that closes it, and False if the text ends before. It counts brackets outside
        strings to find this bracket, and does not check that the JSON is valid.
        """
        depth, in_string, escaped = 0, False, False
        while True:
            text, at = self._text, self._at
            while at < len(text):
                if escaped:
                    at, escaped = at + 1, False
                    continue
                found = (_IN_STRING if in_string else _OUTSIDE).search(text, at)
                if found is None:
                    at = len(text)
                    break
                at, char = found.end(), found.group()
                if in_string:
                    in_string, escaped = char != '"', char == "\\"
                elif char == '"':
                    in_string = True
                else:
                    depth += 1 if char in "{[" else -1
                    if not depth:
                        emit(self.take(at - self._at))
                        return True
            if at > self._at:
                emit(self.take(at - self._at))
            if self.ended:
                return False
            yield

    def scalar(self, limit: int) -> Reading[str | None]:
        """Consumes a JSON number, true, false or null, and returns it as written.

        It takes any run of letters, digits, `+`, `-` and `.`. Returns None if there is none, or if it has more than
        `limit` characters.
        """
        parts: list[str] = []
        while len(parts) <= limit:
            char = yield from self.peek()
            if not char or not (char.isalnum() or char in "+-."):
                return "".join(parts) or None
            parts.append(self.take(1))
        return None


class Markers:
    """A set of texts that a Cursor searches for. No text of the set may contain another one."""

    __slots__ = ("_firsts", "_texts", "longest", "pattern")

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = tuple(dict.fromkeys(texts))
        self._firsts = "".join(dict.fromkeys(text[0] for text in self._texts))
        self.longest = max(map(len, self._texts), default=0)
        self.pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def begun(self, text: str, start: int) -> int:
        """Returns how many characters at the end of `text` may be the start of a marker; 0 if none.

        Characters before `start` do not count. The caller has checked that no whole marker is in the text.
        """
        low = max(start, len(text) - self.longest + 1)
        best = len(text)
        for first in self._firsts:
            at = text.find(first, low, best)
            while at >= 0:
                tail = text[at:]
                if any(marker.startswith(tail) for marker in self._texts):
                    best = at
                    break
                at = text.find(first, at + 1, best)
        return len(text) - best
