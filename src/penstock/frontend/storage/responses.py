"""Stored responses: their own input and their answer. A response continues at most one other."""

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.limits import RequestLimits

_PART = 1 << 20  # bytes that are deleted at once: SQLite's log may have as many
_LENGTH = "LENGTH(input) + LENGTH(output) + LENGTH(rest)"


@dataclass(frozen=True, slots=True)
class Turn:
    """The stored part of a response, as JSON."""

    input: bytes  # its own input items
    output: bytes  # its output items
    rest: bytes  # the other fields of the response

    @property
    def response(self) -> bytes:
        return self.rest[:-1] + b',"output":' + self.output + b"}"


@dataclass(frozen=True, slots=True)
class Chain:
    """The responses that a new one continues."""

    previous: str
    depth: int  # how many they are
    size: int  # of their items in bytes
    items: tuple[bytes, ...]  # their input and output items as JSON arrays, the oldest first


def size_of(connection: sqlite3.Connection, owner: str, response_id: str) -> int:
    """The bytes of what `find` returns. Raises APIError 404."""
    row = _row(connection, _LENGTH, owner, response_id)
    if row is None:
        raise _unknown(response_id)
    return int(row[0])


def find(connection: sqlite3.Connection, owner: str, response_id: str) -> Turn:
    """A response. Raises APIError 404."""
    row = _row(connection, "input, output, rest", owner, response_id)
    if row is None:
        raise _unknown(response_id)
    return Turn(*row)


def chain_size(connection: sqlite3.Connection, owner: str, response_id: str, limits: RequestLimits) -> tuple[int, int]:
    """The number of the responses up to `response_id`, and the bytes of their items. Raises APIError 400 if they are
    more than the limits: the last one has the counts of all, so nothing else is read."""
    row = _row(connection, "depth, bytes", owner, response_id)
    if row is None:
        raise _missing(response_id)
    depth, size = row
    if depth >= limits.max_response_chain or size > limits.max_body_bytes:
        raise invalid(
            f"previous_response_id ends a chain of {depth} responses with {size} bytes; the limits are "
            f"{limits.max_response_chain} and {limits.max_body_bytes} (--max-body-size): start a new chain with the "
            "conversation, or a part of it, in input",
            "previous_response_id",
            "chain_too_long",
        )
    return depth, size


def read_chain(connection: sqlite3.Connection, owner: str, response_id: str, limits: RequestLimits) -> Chain:
    """The responses up to `response_id`. Raises APIError 400 as `chain_size` does, and if one is unknown."""
    depth, size = chain_size(connection, owner, response_id, limits)
    items: list[bytes] = []
    wanted: str | None = response_id
    while wanted is not None and len(items) < 2 * depth:
        found = _row(connection, "output, input, previous", owner, wanted)
        if found is None:
            raise _missing(wanted)
        items += found[:2]
        wanted = found[2]
    return Chain(response_id, depth, size, tuple(reversed(items)))


def add(
    connection: sqlite3.Connection, owner: str, response_id: str, chain: Chain | None, expires: int, turn: Turn
) -> None:
    """Stores a response."""
    own = len(turn.input) + len(turn.output)
    depth, size, previous = (0, 0, None) if chain is None else (chain.depth, chain.size, chain.previous)
    connection.execute(
        "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (response_id, owner, expires, previous, depth + 1, size + own, turn.input, turn.output, turn.rest),
    )


def delete(connection: sqlite3.Connection, owner: str, response_id: str) -> bytes:
    """Deletes a response. Returns the answer. Raises APIError 404."""
    deleted = connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner))
    if not deleted.rowcount:
        raise _unknown(response_id)
    return orjson.dumps({"id": response_id, "object": "response", "deleted": True})


def expire(connection: sqlite3.Connection) -> int:
    """Deletes what has expired, at most 100 responses. Returns how many."""
    return connection.execute(
        "DELETE FROM responses WHERE rowid IN (SELECT rowid FROM responses WHERE expires <= ? LIMIT 100)",
        (int(time.time()),),
    ).rowcount


def drop_oldest(connection: sqlite3.Connection) -> int:
    """Deletes the responses that expire first: about 1 MiB, or one that is larger. Returns how many."""
    places, size = [], 0
    query = f"SELECT rowid, {_LENGTH} FROM responses ORDER BY expires LIMIT 1000"
    for place, length in connection.execute(query):
        places.append((place,))
        size += length
        if size >= _PART:
            break
    connection.executemany("DELETE FROM responses WHERE rowid = ?", places)
    return len(places)


def _row(connection: sqlite3.Connection, columns: str, owner: str, response_id: str) -> Any:
    """The columns of a response of the owner; None if there is none, or it has expired."""
    query = f"SELECT {columns} FROM responses WHERE id = ? AND owner = ? AND expires > ?"
    return connection.execute(query, (response_id, owner, int(time.time()))).fetchone()


def _unknown(response_id: str) -> APIError:
    return APIError(404, f"there is no response {response_id[:100]!r}; it may have expired", code="not_found")


def _missing(response_id: str) -> APIError:
    return invalid(
        f"there is no response {response_id[:100]!r}: it was not stored, or it has expired or was deleted; send the "
        "conversation in input",
        "previous_response_id",
        "previous_response_not_found",
    )
