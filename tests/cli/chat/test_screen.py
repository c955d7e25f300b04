"""What is printed, and when it has colours."""

import io
from contextlib import suppress

import pytest

from penstock.cli.chat.screen import Screen


class Stream(io.StringIO):
    """A file that may be a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(out: Stream, *pieces: str, markdown: bool = True) -> str:
    with Screen(out, out).answer(markdown=markdown) as answer:
        for piece in pieces:
            answer.write(piece)
    return out.getvalue()


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_markdown_is_for_terminals_that_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ("# Ti", "tle\n", "**b\x1b[2J**")
    assert shown(Stream(True), *pieces) == "\x1b[1;36mTitle\x1b[0m\n\x1b[1mb␛[2J\x1b[0m\n"
    plain = "# Title\n**b␛[2J**\n"
    assert shown(Stream(False), *pieces) == plain  # a pipe often ends at a terminal
    assert shown(Stream(True), *pieces, markdown=False) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Stream(True), *pieces) == plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert shown(Stream(True), *pieces) == plain


def test_an_answer_that_fails_ends_its_colour_and_its_line() -> None:
    out = Stream(True)
    with suppress(ZeroDivisionError), Screen(out, out).answer(markdown=True) as answer:
        answer.write("```\ncode")
        raise ZeroDivisionError
    assert out.getvalue().endswith("\x1b[36mcode\x1b[0m\n")


def test_what_is_not_an_answer() -> None:
    out, err = Stream(False), Stream(True)
    screen = Screen(out, err)
    screen.notice("a \x1b[2J")
    screen.error("b")
    screen.table("name  value\nno columns")
    assert err.getvalue() == "\x1b[2ma ␛[2J\x1b[0m\n\x1b[31mb\x1b[0m\n\x1b[1mname\x1b[0m  value\nno columns\n"
    assert out.getvalue() == ""
