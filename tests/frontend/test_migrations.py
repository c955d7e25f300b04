"""A database of every older version is opened by this one, and nothing in it is lost."""

import sqlite3
import time
from pathlib import Path

import pytest

from penstock.frontend.errors import APIError
from penstock.frontend.limits import RequestLimits
from penstock.frontend.storage import batches, files, responses, tables
from penstock.frontend.storage.database import Database

NAME = "penstock.sqlite3"
LATER = int(time.time()) + 86_400
# The tables as the first servers made them, before tables had a version.
FIRST = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT, expires INTEGER, previous TEXT, depth INTEGER, bytes INTEGER,
    input BLOB, output BLOB, rest BLOB);
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, name TEXT, purpose TEXT, bytes INTEGER,
    created INTEGER, expires INTEGER, complete INTEGER);
CREATE TABLE chunks (file TEXT, number INTEGER, data BLOB, PRIMARY KEY (file, number));
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, open INTEGER, expires INTEGER, fields BLOB);
CREATE INDEX files_of_owner ON files (owner, number);
CREATE INDEX batches_of_owner ON batches (owner, number);
CREATE INDEX open_batches ON batches (open) WHERE open = 1;
CREATE INDEX responses_end ON responses (expires);
"""
ROWS = f"""
INSERT INTO responses VALUES ('resp_1', 'o', {LATER}, NULL, 1, 30, '[{{"a":1}}]', '[{{"b":2}}]', '{{"id":"resp_1"}}');
INSERT INTO responses VALUES ('resp_2', 'o', {LATER}, 'resp_1', 2, 60, '[{{"c":3}}]', '[]', '{{"id":"resp_2"}}');
UPDATE responses SET input = CAST(input AS BLOB), output = CAST(output AS BLOB), rest = CAST(rest AS BLOB);
INSERT INTO files VALUES (7, 'file-1', 'o', 'in.jsonl', 'batch', 3, 1, {LATER}, 1);
INSERT INTO chunks VALUES ('file-1', 0, CAST('abc' AS BLOB));
INSERT INTO batches VALUES (3, 'batch_1', 'o', 0, {LATER}, '{{"id":"batch_1","status":"completed","output":null}}');
"""
OLDER = {0: FIRST, 1: FIRST + "PRAGMA user_version = 1;"}  # a row for each version that was in use


def write(folder: Path, version: int) -> None:
    connection = sqlite3.connect(folder / NAME)
    connection.executescript(OLDER[version] + ROWS)
    connection.close()


def version_in(folder: Path) -> int:
    connection = sqlite3.connect(folder / NAME)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return int(version)


async def check_content(storage: Database) -> None:
    chain = await storage.run(lambda db: responses.read_chain(db, "o", "resp_2", RequestLimits()))
    assert chain.items == (b'[{"a":1}]', b'[{"b":2}]', b'[{"c":3}]', b"[]")
    found = await storage.run(lambda db: files.find(db, "o", "file-1"))
    assert (found.name, found.bytes, found.purpose) == ("in.jsonl", 3, "batch")
    assert await storage.run(lambda db: files.numbers(db, "file-1", 0, 9)) == {0}
    assert (await storage.run(lambda db: batches.find(db, "o", "batch_1")))["status"] == "completed"
    await storage.run(lambda db: files.append(db, "file-1", 1, b"de"))  # and it can be written
    assert await storage.run(lambda db: files.count(db, "file-1")) == 2


def test_every_older_version_has_a_row() -> None:
    assert set(OLDER) >= set(range(len(tables.STEPS)))


@pytest.mark.parametrize("version", sorted(OLDER))
async def test_an_older_database_is_opened_with_all_its_content(tmp_path: Path, version: int) -> None:
    write(tmp_path, version)
    storage = Database(tmp_path, 1 << 30)
    await check_content(storage)
    await storage.close()
    assert version_in(tmp_path) == len(tables.STEPS)
    again = Database(tmp_path, 1 << 30)
    assert await again.run(lambda db: files.count(db, "file-1")) == 2  # what the first start has written
    await again.close()


async def test_a_step_changes_the_tables_of_a_file_with_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = "ALTER TABLE files ADD COLUMN digest TEXT DEFAULT ''; CREATE INDEX by_digest ON files (digest);"
    write(tmp_path, 1)
    monkeypatch.setattr(tables, "STEPS", (*tables.STEPS, step))
    storage = Database(tmp_path, 1 << 30)
    with caplog.at_level("INFO", "penstock.storage"):
        await check_content(storage)
    assert await storage.run(lambda db: db.execute("SELECT id, digest FROM files").fetchall()) == [("file-1", "")]
    await storage.close()
    assert version_in(tmp_path) == 2
    assert "tables of version 1 were brought up to version 2" in caplog.text


async def test_a_step_that_fails_leaves_the_file_to_the_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "STEPS", (*tables.STEPS, "DROP TABLE responses; ALTER TABLE unknown ADD COLUMN x;"))
        storage = Database(tmp_path, 1 << 30)
        with pytest.raises(APIError, match="no such table: unknown"):
            await storage.run(lambda db: None)
        await storage.close()
    assert version_in(tmp_path) == 1
    storage = Database(tmp_path, 1 << 30)
    await check_content(storage)
    await storage.close()
