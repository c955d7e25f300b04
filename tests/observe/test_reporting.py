"""What a command waits for is on standard error: one line on a terminal, now and then a line elsewhere."""

import io
import re
import sys
import time

import pytest

from penstock.observe import reporting as module
from penstock.observe.reporting import reporting
from tests.patience import wait_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERMINAL_SECONDS", "FIRST_SECONDS", "FILE_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)


def test_a_file_gets_lines_with_the_latest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with reporting("loading") as say:
        wait_for(lambda: len(re.findall(r"loading \(\d+ s\)\n", file.getvalue())) >= 2)
        say("1 of 3 done")
        wait_for(lambda: re.search(r"\n1 of 3 done \(\d+ s\)\n", file.getvalue()) is not None)
    said = file.getvalue()
    time.sleep(0.05)
    assert file.getvalue() == said and "\r" not in said and "\x1b" not in said


def test_a_terminal_gets_one_line_that_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    with reporting("a text that is longer than the terminal is wide"):
        wait_for(lambda: terminal.getvalue() != "")
    said = terminal.getvalue()
    assert "\n" not in said and said.endswith("\r\x1b[K")
    assert set(said.removesuffix("\x1b[K").split("\x1b[K\r")) == {"a text that is long", ""}


def test_short_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(module, "FIRST_SECONDS", 60.0)
    with reporting("loading"):
        pass
    assert file.getvalue() == ""


def test_a_stream_that_is_gone_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with reporting("loading"):
        file.close()
        time.sleep(0.05)
