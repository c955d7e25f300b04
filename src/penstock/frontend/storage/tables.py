"""The tables of the storage, and the steps that bring those of an older version of Penstock up to this one's."""

import logging
import sqlite3

# Step i brings tables of version i to version i + 1. A step is never changed, as files were written by it: a change of
# the tables is another step, and a row in tests/frontend/test_migrations.py. Files of the first servers have all tables
# of the first step and the version 0.
STEPS: tuple[str, ...] = (
    """
    CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY, owner TEXT, expires INTEGER, previous TEXT, depth INTEGER, bytes INTEGER,
        input BLOB, output BLOB, rest BLOB);
    CREATE TABLE IF NOT EXISTS files (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, name TEXT, purpose TEXT, bytes INTEGER,
        created INTEGER, expires INTEGER, complete INTEGER);
    CREATE TABLE IF NOT EXISTS chunks (file TEXT, number INTEGER, data BLOB, PRIMARY KEY (file, number));
    CREATE TABLE IF NOT EXISTS batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, open INTEGER, expires INTEGER,
        fields BLOB);
    CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, number);
    CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, number);
    CREATE INDEX IF NOT EXISTS open_batches ON batches (open) WHERE open = 1;
    CREATE INDEX IF NOT EXISTS responses_end ON responses (expires);
    """,
)
_log = logging.getLogger("penstock.storage")


def version_of(connection: sqlite3.Connection) -> int:
    """Returns the version of a file's tables; 0 for a new file. Raises sqlite3.Error for one that is no database, and
    if a later version of Penstock has written it."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(STEPS):
        raise sqlite3.DatabaseError(
            f"another version of Penstock has written it: its tables have the version {version}, and this one's "
            f"{len(STEPS)}"
        )
    return version


def upgrade(connection: sqlite3.Connection) -> None:
    """Makes the tables, or brings those of an older version up to this one's. A step that fails changes nothing, and
    the file stays as the version before it."""
    before = version_of(connection)
    for number, step in enumerate(STEPS[before:], before + 1):
        # `executescript` commits nothing by itself in a transaction that the script begins.
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {step} PRAGMA user_version = {number}; COMMIT;")
        except sqlite3.Error:
            connection.rollback()
            raise
    if 0 < before < len(STEPS):
        _log.info("the storage's tables of version %d were brought up to version %d", before, len(STEPS))
