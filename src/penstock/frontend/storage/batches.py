"""Batches: their fields as JSON, in the order in which they were created."""

import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import orjson

from penstock.frontend.errors import APIError
from penstock.frontend.limits import RequestLimits
from penstock.frontend.requests.pages import Page
from penstock.frontend.storage import files

Fields = dict[str, Any]
_SIDE_BY_SIDE = 64  # each holds a part of its input, up to one line more than a chunk of the file
_OWN = ("output", "errors_to", "owner", "kept_until")  # fields that no client sees


def add(connection: sqlite3.Connection, owner: str, fields: Fields, expires: int, limits: RequestLimits) -> None:
    """Stores a new batch. Raises APIError 429 if the owner has too many that are not complete."""
    query = "SELECT COUNT(*) FROM batches WHERE open = 1 AND owner = ?"
    (held,) = connection.execute(query, (owner,)).fetchone()
    if held >= limits.max_batches:
        raise APIError(
            429,
            f"{held} batches are not complete, the limit; wait until one is, or cancel one",
            code="too_many_batches",
            retry_after=60,
        )
    connection.execute(
        "INSERT INTO batches (id, owner, open, expires, fields) VALUES (?, ?, 1, ?, ?)",
        (fields["id"], owner, expires, orjson.dumps(fields)),
    )


def save(connection: sqlite3.Connection, fields: Fields, *, ended: bool = False) -> None:
    connection.execute(
        "UPDATE batches SET fields = ?, open = ? WHERE id = ?", (orjson.dumps(fields), int(not ended), fields["id"])
    )


def find(connection: sqlite3.Connection, owner: str, batch_id: str, param: str | None = None) -> Fields:
    """The fields of a batch. Raises APIError 404."""
    row = connection.execute(
        "SELECT fields FROM batches WHERE id = ? AND owner = ? AND expires > ?", (batch_id, owner, int(time.time()))
    ).fetchone()
    if row is None:
        raise APIError(404, f"there is no batch {batch_id[:100]!r}; it may have expired", param=param, code="not_found")
    return _counted(connection, orjson.loads(row[0]))


def page_of(connection: sqlite3.Connection, owner: str, page: Page) -> list[Fields]:
    """The batches of a page, and one more if there are more. Raises APIError 404 for an unknown `after`."""
    where, values = "owner = ? AND expires > ?", [owner, int(time.time())]
    if page.after:
        find(connection, owner, page.after, "after")
        where += " AND number < (SELECT number FROM batches WHERE id = ?)"
        values.append(page.after)
    query = f"SELECT fields FROM batches WHERE {where} ORDER BY number DESC LIMIT {page.limit + 1}"
    rows = connection.execute(query, values).fetchall()
    return [_counted(connection, orjson.loads(fields)) for (fields,) in rows]


def opened(connection: sqlite3.Connection, owners: Sequence[str]) -> list[Fields]:
    """The oldest batches of these owners that are not complete: as many as run side by side."""
    among = "SELECT value FROM json_each(?)"
    query = f"SELECT fields FROM batches WHERE open = 1 AND owner IN ({among}) ORDER BY number LIMIT {_SIDE_BY_SIDE}"
    return [orjson.loads(fields) for (fields,) in connection.execute(query, (orjson.dumps(owners).decode(),))]


def expire(connection: sqlite3.Connection) -> int:
    """Deletes the batches that have expired. Returns how many. One that is open is of a key that is no longer used."""
    now = int(time.time())
    query = "SELECT fields FROM batches WHERE open = 1 AND expires <= ?"
    for (fields,) in connection.execute(query, (now,)).fetchall():
        batch = orjson.loads(fields)
        for file_id in filter(None, (batch["output"], batch["errors_to"])):
            files.hide(connection, file_id)
    return connection.execute("DELETE FROM batches WHERE expires <= ?", (now,)).rowcount


def shown(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name not in _OWN}


def _counted(connection: sqlite3.Connection, fields: Fields) -> Fields:
    """The fields with the counts of a batch that runs."""
    if fields["output"] and fields["status"] in ("in_progress", "cancelling", "finalizing"):
        fields["request_counts"] |= {
            "completed": files.count(connection, fields["output"]),
            "failed": files.count(connection, fields["errors_to"]),
        }
    return fields
