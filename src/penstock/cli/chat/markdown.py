"""Shows Markdown in a terminal while it arrives: headings, lists, quotes, rules, code blocks, bold and code.

Everything else stays as the model writes it. Marks are left out in pairs only, so no text is lost: a span is held back
until its closing mark arrives, for at most `MAX_SPAN` characters.
"""

import re

from penstock.cli.chat.safe_text import printable
from penstock.cli.chat.wrap import LineWriter

BOLD, DIM, CODE, HEADING = "1", "2", "36", "1;36"
MAX_SPAN = 200
MAX_PREFIX = 60  # a line that begins with more spaces, dashes or digits is ordinary text
RULE_COLUMNS = 40

_FENCE = re.compile(r" {0,3}(`{3,20}|~{3,20})([^\n`]{0,100})\n")
_MAYBE_FENCE = re.compile(r" {0,3}(`{1,2}|~{1,2}|`{3,20}[^\n`]{0,100}|~{3,20}[^\n`]{0,100})")
_FENCE_END = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*(\n|\Z)")
_MAYBE_FENCE_END = re.compile(r" {0,3}(`*|~*)[ \t]*")
_BLANK = re.compile(r"[ \t]*\n")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(?=\S)")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*\n")
_BULLET = re.compile(r"([ \t]*)[-*+][ \t]+(?=\S)")
_NUMBER = re.compile(r"[ \t]*\d{1,9}[.)][ \t]+(?=\S)")
_QUOTE = re.compile(r" {0,3}>[ \t]?(?=[^ \t])")
_MAYBE_BLOCK = re.compile(
    r"[ \t]*| {0,3}#{1,6}[ \t]*| {0,3}([-*_])(?:[ \t]*\1)*[ \t]*|[ \t]*[-*+][ \t]*|[ \t]*\d{1,9}[.)]?[ \t]*"
    r"| {0,3}>[ \t]*"
)
_PLAIN = re.compile(r"[^\n`*]+")
_RUN = re.compile(r"`+|\*+")
_CODE_IN_BOLD = re.compile(r"(`[^`]+`)")


class MarkdownStream:
    """Renders text that arrives in pieces. How it is cut into pieces does not change the result."""

    def __init__(self, width: int) -> None:
        """`width` of the terminal in columns."""
        self._lines = LineWriter(width)
        self._rule = "─" * min(RULE_COLUMNS, width)
        self._pending = ""  # what cannot be shown yet
        self._began = False  # blank lines before the text are left out
        self._at_start = True  # of a line
        self._fence = ""  # the mark that opened the code block, or ""
        self._style = ""  # of the line: that of a heading
        self._before = ""  # the character before the pending ones, on the same line

    def push(self, text: str) -> str:
        """Returns what to print for the next piece."""
        self._pending += printable(text).replace("\t", "    ")
        return self._render(final=False)

    def finish(self) -> str:
        """Returns what was held back, and ends every colour."""
        return self._render(final=True) + self._lines.flush()

    def _render(self, *, final: bool) -> str:
        out: list[str] = []
        while self._pending:
            step = self._code if self._fence else self._line_start if self._at_start else self._span
            shown = step(final)
            if shown is None:  # the next piece decides
                break
            out.append(shown)
        return "".join(out)

    def _take(self, count: int) -> str:
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def _code(self, final: bool) -> str | None:
        if self._at_start:
            head = self._pending[: MAX_PREFIX + 1]
            end = _FENCE_END.match(head)
            complete = end is not None and (end[2] or (final and end.end() == len(self._pending)))
            if end is not None and complete and end[1].startswith(self._fence):
                self._take(end.end())
                self._fence = ""
                return self._lines.write(self._rule, DIM) + self._lines.end_line()
            if not final and len(self._pending) <= MAX_PREFIX and _MAYBE_FENCE_END.fullmatch(head):
                return None
            self._at_start = False
            self._lines.start_line(wraps=False)
        line, newline, _ = self._pending.partition("\n")
        self._take(len(line) + len(newline))
        shown = self._lines.write(line, CODE)
        return shown + self._new_line() if newline else shown

    def _line_start(self, final: bool) -> str | None:
        if not self._began and (blank := _BLANK.match(self._pending)):
            self._take(blank.end())
            return ""
        if fence := _FENCE.match(self._pending):
            self._take(fence.end())
            self._began, self._fence = True, fence[1]
            title = f"── {name} " if (name := fence[2].strip()) else ""
            self._lines.start_line(wraps=False)
            return self._lines.write(title + self._rule[len(title) :], DIM) + self._lines.end_line()
        head = self._pending[: MAX_PREFIX + 1]
        maybe_block = len(self._pending) <= MAX_PREFIX and _MAYBE_BLOCK.fullmatch(head)
        if not final and (maybe_block or _MAYBE_FENCE.fullmatch(self._pending)):
            return None
        self._began, self._at_start = True, False
        return self._block(head)

    def _block(self, head: str) -> str:
        """Begins a line that is no code. `head` is enough of it to see what it is."""
        lines = self._lines
        if rule := _RULE.match(head):
            self._take(rule.end() - 1)
            lines.start_line()
            return lines.write(self._rule, DIM)
        if heading := _HEADING.match(head):
            self._take(heading.end())
            self._style = HEADING
            lines.start_line()
            return ""
        if bullet := _BULLET.match(head):
            self._take(bullet.end())
            lines.start_line(hang=len(bullet[1]) + 2)
            return lines.write(bullet[1] + "• ")
        if number := _NUMBER.match(head):
            lines.start_line(hang=number.end())
            return lines.write(self._take(number.end()))
        if quote := _QUOTE.match(head):
            self._take(quote.end())
            lines.start_line(hang=2)
            return lines.write("│ ", DIM)
        indent = len(self._pending) - len(self._pending.lstrip(" "))
        lines.start_line(hang=indent, wraps=not head.startswith("|"))  # a broken row makes a table unreadable
        return lines.write(self._take(indent))

    def _span(self, final: bool) -> str | None:
        if self._pending[0] == "\n":
            self._take(1)
            return self._new_line()
        if plain := _PLAIN.match(self._pending):
            return self._show(self._take(plain.end()), self._style)
        run = _RUN.match(self._pending)
        assert run is not None
        mark = run[0]
        if run.end() == len(self._pending) and len(mark) < MAX_SPAN and not final:
            return None
        if not self._opens(mark):
            return self._show(self._take(len(mark)), self._style)
        closing = self._closing(mark, final)
        if closing is None:
            return None
        if closing < 0:
            return self._show(self._take(len(mark)), self._style)
        content = self._take(closing + len(mark))[len(mark) : closing]
        if mark[0] == "`":
            inner = content[1:-1] if len(mark) > 1 and content[:1] == content[-1:] == " " else content
            return self._show(inner, CODE)
        parts = _CODE_IN_BOLD.split(content)
        bold = self._style or BOLD
        return "".join(
            self._show(part.strip("`"), CODE) if i % 2 else self._show(part, bold) for i, part in enumerate(parts)
        )

    def _opens(self, mark: str) -> bool:
        """True if a closing mark would make this a span. 2**8 and `a ** b` are no spans."""
        after = self._pending[len(mark) : len(mark) + 1]
        if mark[0] == "`":
            return after not in ("", "\n")
        return len(mark) in (2, 3) and after not in ("", " ", "\n") and not _in_word(self._before)

    def _closing(self, mark: str, final: bool) -> int | None:
        """Returns where the closing mark begins, -1 if there is none, or None if it may still come."""
        window = self._pending[:MAX_SPAN]
        line, newline, _ = window.partition("\n")
        for run in _RUN.finditer(line, len(mark)):
            if run[0] != mark:
                continue
            if mark[0] == "*" and (line[run.start() - 1] == " " or _in_word(line[run.end() : run.end() + 1])):
                continue
            if run.end() < len(window) or newline:
                return run.start()
            if final and run.end() == len(self._pending):
                return run.start()
        return -1 if newline or final or len(self._pending) >= MAX_SPAN else None

    def _show(self, text: str, style: str) -> str:
        self._before = text[-1:]
        return self._lines.write(text, style)

    def _new_line(self) -> str:
        self._at_start, self._style, self._before = True, "", ""
        return self._lines.end_line()


def _in_word(char: str) -> bool:
    """True for a letter or digit of a language that writes spaces between words."""
    return char.isascii() and char.isalnum()
