"""Breaks lines between words while text arrives, and switches colours. What is printed is never changed again."""

import unicodedata
from functools import lru_cache

AHEAD = 24  # columns: a word that begins this close to the margin is held back until it is complete
NARROWEST = 2 * AHEAD
RESET = "\x1b[0m"


@lru_cache(4096)
def columns(char: str) -> int:
    """Returns how many columns a terminal gives to a character."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class LineWriter:
    """Turns styled characters into what to print. How the text is cut into calls does not change the result.

    A style is the parameters of an SGR sequence, "1" for bold, or "" for none.
    """

    def __init__(self, width: int) -> None:
        """`width` in columns; lines are not broken if it is less than `NARROWEST`."""
        self._width = width if width >= NARROWEST else 0
        self._wraps = True
        self._hang = 0  # the column at which a broken line continues (hanging indent)
        self._column = 0
        self._style = ""
        self._gap = 0  # spaces before the next word
        self._word = ""  # held back, with its colours
        self._word_columns = 0
        self._flows = False  # the current word has begun to appear

    def write(self, text: str, style: str = "") -> str:
        """Returns what can be printed now. `text` has no line break."""
        out: list[str] = []
        for char in text:
            if char == " ":
                out.append(self._end_word())
                self._gap += 1
            elif not self._width or not self._wraps:
                out += (self._end_word(), self._space(), self._switch(style), char)
                self._column += columns(char)
            else:
                out.append(self._add(char, columns(char), style))
        return "".join(out)

    def start_line(self, *, hang: int = 0, wraps: bool = True) -> None:
        """Sets how the next line is broken: it continues at column `hang`. Without `wraps` it is not broken."""
        self._hang = hang if hang < self._width // 2 else 0
        self._wraps = wraps

    def end_line(self) -> str:
        """Returns the end of a line, without colour. Spaces at its end are left out."""
        done = self.flush() + "\n"
        self._column = self._gap = 0
        return done

    def flush(self) -> str:
        """Returns what was held back, and ends the colour."""
        return self._end_word() + self._switch("")

    def _add(self, char: str, wide: int, style: str) -> str:
        if wide == 2:  # Chinese and Japanese have no spaces: a line may break at each character
            out = self._end_word() + self._break_if(wide) + self._space() + self._switch(style) + char
            self._column += wide
            return out
        if not self._flows and not self._word and self._column + self._gap + AHEAD <= self._width:
            self._flows = True
            out = self._space() + self._switch(style) + char
            self._column += wide
            return out
        if self._flows:
            self._column = (self._column + wide - 1) % self._width + 1  # the terminal breaks a word that is too long
            return self._switch(style) + char
        self._word += self._switch(style) + char
        self._word_columns += wide
        if self._word_columns < AHEAD:
            return ""
        out = self._end_word()  # longer than what is left of the line
        self._flows = True
        return out

    def _end_word(self) -> str:
        self._flows = False
        if not self._word:
            return ""
        out = self._break_if(self._word_columns) + self._space() + self._word
        self._column += self._word_columns
        self._word, self._word_columns = "", 0
        return out

    def _break_if(self, wide: int) -> str:
        if self._column + self._gap + wide <= self._width or self._column <= self._hang:
            return ""
        self._gap = 0
        self._column = self._hang
        return "\n" + " " * self._hang

    def _space(self) -> str:
        spaces, self._gap = " " * self._gap, 0
        self._column += len(spaces)
        return spaces

    def _switch(self, style: str) -> str:
        if style == self._style:
            return ""
        before, self._style = self._style, style
        return (RESET if before else "") + (f"\x1b[{style}m" if style else "")
