"""A database that cannot be used: the error says why, and the file stays as it was."""

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.frontend.errors import APIError
from penstock.frontend.storage import files
from penstock.frontend.storage.database import Database

NAME = "penstock.sqlite3"


def other_tables(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE files (id TEXT)")
        connection.execute("CREATE TABLE batches (id TEXT)")


def of_a_later_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 77")


def no_database(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_tables, "no such column"),
        (of_a_later_version, "another version of Penstock has written it: its tables have the version 77"),
        (no_database, "file is not a database"),
    ],
)
async def test_the_reason_is_told_and_nothing_is_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(tmp_path / NAME)
    before = (tmp_path / NAME).read_bytes()
    storage = Database(tmp_path, 1 << 30)
    with caplog.at_level(logging.ERROR), pytest.raises(APIError, match=words) as refused:
        await storage.run(lambda db: files.count(db, "a"))
    await storage.close()
    assert refused.value.status == 503
    assert "move penstock.sqlite3 away or name another --state-dir" in caplog.text
    if spoil is not other_tables:
        assert (tmp_path / NAME).read_bytes() == before


async def test_the_tables_have_a_version(tmp_path: Path) -> None:
    for _ in range(2):
        storage = Database(tmp_path, 1 << 30)
        await storage.run(lambda db: files.append(db, "a", files.count(db, "a"), b"x"))
        await storage.close()
        with sqlite3.connect(tmp_path / NAME) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (1,)
            connection.execute("PRAGMA user_version = 0")  # as written before there was a version
    storage = Database(tmp_path, 1 << 30)
    assert await storage.run(lambda db: files.count(db, "a")) == 2
    await storage.close()
