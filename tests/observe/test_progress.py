"""Progress is for people at a terminal, and for nobody else."""

import io
import sys

import pytest

from penstock.observe.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, *, wanted: bool = True, in_bytes: bool = False) -> str:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("loading [tiny]", 2_000_000, wanted=wanted, in_bytes=in_bytes) as advance:
        advance(1_500_000)
        advance(500_000)
    return stderr.getvalue()


def test_a_terminal_sees_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = shown(monkeypatch, Terminal())
    assert "loading [tiny]" in counted
    assert "2000000/2000000" in counted
    assert "2.0/2.0 MB" in shown(monkeypatch, Terminal(), in_bytes=True)


def test_a_file_or_who_wants_none_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""
    assert shown(monkeypatch, Terminal(), wanted=False) == ""
