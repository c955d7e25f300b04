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


def test_a_line_of_a_table_is_broken_between_words_and_below_its_last_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    monkeypatch.setenv("NO_COLOR", "1")
    table = "/set [NAME [VALUE]]  Show the settings, or change one\n\n/?                   Show this help"
    for terminal, lines in (
        (True, ["/set [NAME [VALUE]]  Show the settings, or", f"{'':21}change one", "", f"{'/?':21}Show this help"]),
        (False, table.splitlines()),
    ):
        err = Stream(terminal)
        Screen(Stream(True), err).table(table)
        assert err.getvalue().splitlines() == lines
    err = Stream(True)
    Screen(err, err).notice("(cut at max_tokens 4096; /set max_tokens N allows more)")
    assert err.getvalue() == "(cut at max_tokens 4096; /set max_tokens N\nallows more)\n"
