"""What the user types: when lines are a complete message, and the file of earlier ones."""

import os
from pathlib import Path

import pytest

from penstock.cli.chat import history
from penstock.cli.chat.entry import goes_on, message
from penstock.cli.chat.history import HistoryFile, history_path


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("one", False),
        ("one \\", True),
        ("a path \\\\", False),
        ('"""', True),
        ('"""one\ntwo', True),
        ('"""one\ntwo\n"""', False),
        ('"""one"""', False),
        ('say """', False),
        ("a\nb", False),  # pasted
    ],
)
def test_enter_sends_or_begins_a_line(text: str, more: bool) -> None:
    assert goes_on(text) is more


def test_quotes_are_no_part_of_the_message() -> None:
    assert message('"""\none\n\n  two\n"""') == "one\n\n  two"
    assert message('say """') == 'say """'
    assert message("one\ntwo") == "one\ntwo"


def test_a_user_without_a_home_has_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the number of a container's user, without HOME."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    path = history_path({})
    assert path == Path("/nonexistent/.local/state/penstock/run_history")
    assert HistoryFile(path).load() == []


def test_the_history_is_private_and_comes_back(tmp_path: Path) -> None:
    path = history_path({"XDG_STATE_HOME": str(tmp_path)})
    assert path == tmp_path / "penstock" / "run_history"
    assert history_path({"XDG_STATE_HOME": "relative"}).is_relative_to(Path.home())
    prompts = ["one", "two\nlines", "ä 中 \x1b", "\\"]
    for prompt in prompts:
        HistoryFile(path).append(prompt)
    assert HistoryFile(path).load() == prompts
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    HistoryFile(path).append("five")
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 4000)
    file = HistoryFile(tmp_path / "run_history")
    file.append("x" * history.MAX_ENTRY_BYTES)  # too long to keep
    assert file.load() == []
    sizes = []
    for number in range(1500):
        file.append(f"prompt {number}")
        sizes.append((tmp_path / "run_history").stat().st_size)
    assert max(sizes) <= 8000 + 20
    kept = file.load()
    assert kept == [f"prompt {number}" for number in range(1500 - len(kept), 1500)] and len(kept) > 100
    assert os.listdir(tmp_path) == ["run_history"]


def test_a_history_that_cannot_be_used_is_empty(tmp_path: Path) -> None:
    (tmp_path / "run_history").write_bytes(b'\xff\n"good"\n{"no": 1}\n[[\n')
    assert HistoryFile(tmp_path / "run_history").load() == ["good"]
    (tmp_path / "file").write_text("")
    nowhere = HistoryFile(tmp_path / "file" / "run_history")
    nowhere.append("lost")
    assert nowhere.load() == []
