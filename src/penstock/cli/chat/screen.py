"""Prints for `penstock run`: answers on standard output, everything else on standard error."""

import contextlib
import os
import re
import shutil
import textwrap
from typing import IO

from penstock.cli.chat.markdown import BOLD, DIM, MarkdownStream
from penstock.cli.chat.safe_text import printable
from penstock.cli.chat.wrap import RESET
from penstock.observe.reporting import reporting

RED = "31"
_BEFORE_LAST_COLUMN = re.compile(r".*\S {2,}")


def takes_colours(stream: IO[str]) -> bool:
    """True if `stream` is a terminal that shows colours, and the user has not turned them off (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """Prints to a terminal or a file. No text that it prints can control the terminal."""

    def __init__(self, out: IO[str], err: IO[str]) -> None:
        self._out, self._err = out, err
        self._styled = takes_colours(out)
        self._styled_err = takes_colours(err)

    def answer(self, *, markdown: bool) -> "AnswerText":
        """Returns where to write one answer. Without colours, or unless `markdown`, its text is shown as it is."""
        width = shutil.get_terminal_size().columns
        return AnswerText(self._out, MarkdownStream(width) if markdown and self._styled else None)

    def notice(self, text: str) -> None:
        """Prints a remark of Penstock's."""
        self._say(text, DIM)

    def error(self, text: str) -> None:
        self._say(text, RED)

    def table(self, text: str) -> None:
        """Prints what a command shows. In a line with columns, the first one is bold."""
        for line in self._fitted(printable(text)):
            name, gap, rest = line.partition("  ")
            if self._styled_err and name and gap:
                line = f"\x1b[{BOLD}m{name}{RESET}{gap}{rest}"
            print(line, file=self._err)
        self._err.flush()

    def space(self) -> None:
        """Prints an empty line after an answer."""
        print(file=self._out, flush=True)

    def _say(self, text: str, style: str) -> None:
        text = "\n".join(self._fitted(printable(text)))
        print(f"\x1b[{style}m{text}{RESET}" if self._styled_err else text, file=self._err, flush=True)

    def _fitted(self, text: str) -> list[str]:
        """Returns the lines of `text`, those wider than the terminal broken between words, below their last column."""
        lines = text.splitlines()
        if not self._err.isatty():
            return lines
        width = shutil.get_terminal_size().columns
        return [part for line in lines for part in _broken(line, width)]


def _broken(line: str, width: int) -> list[str]:
    before = _BEFORE_LAST_COLUMN.match(line)
    indent = len(before[0]) if before and len(before[0]) <= width // 2 else 0
    parts = textwrap.wrap(line, max(width, 20), subsequent_indent=" " * indent, break_on_hyphens=False)
    return parts or [line]


class AnswerText:
    """One answer on the screen. Until it begins, standard error says that it is waited for. Its end shows what was held
    back, ends every colour and the line."""

    def __init__(self, out: IO[str], markdown: MarkdownStream | None) -> None:
        self._out = out
        self._markdown = markdown
        self._last = "\n"
        self._waiting = contextlib.ExitStack()

    def write(self, text: str) -> None:
        self._print(self._markdown.push(text) if self._markdown else printable(text))

    def __enter__(self) -> "AnswerText":
        self._waiting.enter_context(reporting("waiting for the first token"))
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.close()
        self._print(self._markdown.finish() if self._markdown else "")
        if self._last != "\n":
            self._print("\n")

    def _print(self, text: str) -> None:
        if text:
            self._waiting.close()
            self._out.write(text)
            self._out.flush()
            self._last = text[-1]
