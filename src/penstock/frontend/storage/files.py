"""Files: uploaded, or written by batches. Their content is in numbered chunks; a batch numbers them by its lines."""

import secrets
import sqlite3
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.frontend.errors import APIError
from penstock.frontend.requests.pages import Page

CHUNK = 256 << 10  # bytes, of an upload
_PART = 1 << 20  # bytes that are deleted at once
_COLUMNS = "id, name, purpose, bytes, created, expires"


Chunk = tuple[str, int, bytes]  # the file's id, the chunk's number, its data


class StoredFile(NamedTuple):
    """A complete file, without its content."""

    id: str
    name: str
    purpose: str
    bytes: int
    created: int
    expires: int

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "expires_at": self.expires,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


def begin(connection: sqlite3.Connection, owner: str, name: str, purpose: str, expires: int) -> str:
    """Adds an empty file, which is hidden until it is complete. Returns its id."""
    file_id, now = f"file-{secrets.token_hex(16)}", int(time.time())
    connection.execute(
        "INSERT INTO files (id, owner, name, purpose, bytes, created, expires, complete) VALUES (?,?,?,?,0,?,?,0)",
        (file_id, owner, name, purpose, now, expires),
    )
    return file_id


def append(connection: sqlite3.Connection, file_id: str, number: int, data: bytes) -> None:
    """Adds a chunk, which is the only one with its number."""
    connection.execute("INSERT INTO chunks VALUES (?, ?, ?)", (file_id, number, data))
    connection.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (len(data), file_id))


def append_all(connection: sqlite3.Connection, chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        append(connection, *chunk)


def complete(connection: sqlite3.Connection, file_id: str, name: str, purpose: str, expires: int) -> StoredFile:
    """Makes a file visible to its owner."""
    connection.execute(
        "UPDATE files SET complete = 1, name = ?, purpose = ?, expires = ? WHERE id = ?",
        (name, purpose, expires, file_id),
    )
    row = connection.execute(f"SELECT {_COLUMNS} FROM files WHERE id = ?", (file_id,)).fetchone()
    return StoredFile(*row)


def find(connection: sqlite3.Connection, owner: str, file_id: str, param: str | None = None) -> StoredFile:
    """Raises APIError 404."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner = ? AND complete = 1 AND expires > ?",
        (file_id, owner, int(time.time())),
    ).fetchone()
    if row is None:
        message = f"there is no file {file_id[:100]!r}; it may have expired"
        raise APIError(404, message, param=param, code="not_found")
    return StoredFile(*row)


def page_of(connection: sqlite3.Connection, owner: str, page: Page) -> list[StoredFile]:
    """The files of a page, and one more if there are more. Raises APIError 404 for an unknown `after`."""
    sign, order = ("<", "DESC") if page.newest_first else (">", "ASC")
    where, values = "owner = ? AND complete = 1 AND expires > ?", [owner, int(time.time())]
    if page.after:
        find(connection, owner, page.after, "after")
        where += f" AND number {sign} (SELECT number FROM files WHERE id = ?)"
        values.append(page.after)
    if purpose := page.others.get("purpose"):
        where += " AND purpose = ?"
        values.append(purpose)
    query = f"SELECT {_COLUMNS} FROM files WHERE {where} ORDER BY number {order} LIMIT {page.limit + 1}"
    return [StoredFile(*row) for row in connection.execute(query, values)]


def next_chunk(connection: sqlite3.Connection, file_id: str, after: int) -> tuple[int, bytes] | None:
    """The first chunk with a number above `after`, or None if there is none."""
    row = connection.execute(
        "SELECT number, data FROM chunks WHERE file = ? AND number > ? ORDER BY number LIMIT 1", (file_id, after)
    ).fetchone()
    return None if row is None else (row[0], row[1])


def numbers(connection: sqlite3.Connection, file_id: str, first: int, last: int) -> set[int]:
    """The numbers from `first` to `last` that chunks of a file have."""
    query = "SELECT number FROM chunks WHERE file = ? AND number BETWEEN ? AND ?"
    return {number for (number,) in connection.execute(query, (file_id, first, last))}


def count(connection: sqlite3.Connection, file_id: str) -> int:
    return int(connection.execute("SELECT COUNT(*) FROM chunks WHERE file = ?", (file_id,)).fetchone()[0])


def remove(connection: sqlite3.Connection, file_id: str) -> None:
    connection.execute("DELETE FROM chunks WHERE file = ?", (file_id,))
    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))


def hide(connection: sqlite3.Connection, file_id: str) -> None:
    """Makes a file one that has expired, whether it is complete or not."""
    connection.execute("UPDATE files SET complete = 1, expires = 0 WHERE id = ?", (file_id,))


def remove_part(connection: sqlite3.Connection, file_id: str) -> bool:
    """Deletes some of the content, and with the last of it the file. False if nothing is left. SQLite's log may have
    as many bytes as are deleted at once, and a full disk has room for few."""
    last, size = None, 0
    query = "SELECT number, LENGTH(data) FROM chunks WHERE file = ? ORDER BY number LIMIT 1000"
    for number, length in connection.execute(query, (file_id,)):
        last, size = number, size + length
        if size >= _PART:
            break
    if last is None:
        connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        return False
    connection.execute("DELETE FROM chunks WHERE file = ? AND number <= ?", (file_id, last))
    return True


def hide_abandoned(connection: sqlite3.Connection) -> None:
    """Hides the files whose upload an earlier server did not complete."""
    connection.execute("UPDATE files SET complete = 1, expires = 0 WHERE complete = 0 AND purpose != 'batch_output'")


def expire(connection: sqlite3.Connection) -> int:
    """Deletes a part of a file that has expired. Returns 0 if there is none."""
    row = connection.execute(
        "SELECT id FROM files WHERE complete = 1 AND expires <= ? LIMIT 1", (int(time.time()),)
    ).fetchone()
    if row is None:
        return 0
    remove_part(connection, row[0])
    return 1
