"""The ledger: a row for each request, with what it has used and what it costs.

A thread writes rows in batches, so that no request waits for the disk. A committed row survives a crash of the server.
With several API processes the supervisor writes the rows of all.
"""

import datetime
import logging
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.frontend.tenants.quotas import Amounts, Settlement, counter_key, window
from penstock.frontend.tenants.writer import BackgroundWriter

FILE = "ledger.sqlite3"
MOST_WAITING = 100_000  # rows that are not written yet
_BATCH, _BATCH_SECONDS = 1000, 0.05  # rows of a commit, and the time in which they are gathered
_BUSY_SECONDS = 30.0  # that another process's commit may take
_log = logging.getLogger("penstock.ledger")


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    id: str  # of the answer
    request_id: str = ""  # of the request, as its answer's header has it
    began: float  # seconds since the epoch
    tenant: str  # the tenant's name in the tenants file
    key: str  # the name of the API key; "" for anonymous requests
    model: str
    version: str  # the fingerprint of the weights and all else that answers depend on
    wire: str
    route: str = ""
    status: int = 200  # of the answer; 499: the client has gone
    error: str = ""  # the code of the error that the answer has
    prompt: int = 0  # tokens
    cached: int = 0  # of the prompt, from the prefix cache
    computed: int = 0  # by the engine, with repeated and rejected ones
    output: int = 0
    reasoning: int = 0  # of the output
    rejected: int = 0  # draft tokens
    repeated: int = 0  # computed again after a preemption
    step_ms: float = 0.0  # its part of the engine's steps
    block_seconds: float = 0.0  # KV blocks held, times seconds
    joules: float = 0.0  # of the machine, in its part of the steps
    energy: str = "none"  # where that is from: nvml, rapl, estimate (the tenants file's watts) or none
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    nano: int = 0  # its cost, in billionths of the currency
    currency: str = ""


_Entry = tuple[LedgerRow, Callable[[], object] | None]

FIELDS = LedgerRow.__struct_fields__
_TYPES = {str: "TEXT", float: "REAL", int: "INTEGER"}
_COLUMN = {name: f"{name} {_TYPES[LedgerRow.__annotations__[name]]}" for name in FIELDS if name != "id"}
_TABLES = f"""
    CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, {", ".join(_COLUMN.values())}) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS requests_by_time ON requests (began, tenant);
"""
_LATER = {"joules": "0.0", "energy": "'none'"}  # columns that older ledgers lack, and what their rows have
_INSERT = f"INSERT OR IGNORE INTO requests ({', '.join(FIELDS)}) VALUES ({', '.join('?' * len(FIELDS))})"
_SUMS = (
    *("prompt", "cached", "computed", "output", "reasoning", "rejected", "repeated"),
    *("step_ms", "block_seconds", "joules", "nano"),
)
GROUPS = {
    "tenant": "tenant",
    "key": "tenant || '/' || key",
    "model": "model",
    "wire": "wire",
    "day": "strftime('%Y-%m-%d', began, 'unixepoch')",
    "month": "strftime('%Y-%m', began, 'unixepoch')",
    "hour": "strftime('%Y-%m-%d %H:00', began, 'unixepoch')",
}


class Ledger:
    """Writes rows to the file of one server."""

    def __init__(self, path: Path, days: int) -> None:
        """Rows are kept for `days`. The file is made at once, so that there is one to read."""
        self.path = path
        self._days = days
        self._connection: sqlite3.Connection | None = None
        self._unwritten: list[_Entry] = []  # after an error of the disk
        self._writer = BackgroundWriter[_Entry](
            f"the ledger {path}", self._write, most=MOST_WAITING, batch=_BATCH, gather_seconds=_BATCH_SECONDS
        )

    def add(self, row: LedgerRow, written: Callable[[], object] | None = None) -> None:
        """Write a row soon. Never blocks. `written` is called in another thread when the row is committed."""
        self._writer.add((row, written))

    def close(self) -> None:
        """Write what is left. Blocks for at most a minute."""
        self._writer.close()
        if self._unwritten:
            _log.error("%d rows are missing in the ledger %s", len(self._unwritten), self.path)
        if self._connection is not None:
            self._connection.close()

    def _write(self, entries: list[_Entry]) -> None:
        waiting = self._unwritten + entries
        try:
            if self._connection is None:
                self._connection = open_ledger(self.path)
                _expire(self._connection, self._days)
            if waiting:
                with self._connection:
                    self._connection.executemany(_INSERT, [msgspec.structs.astuple(row) for row, _ in waiting])
        except (sqlite3.Error, OSError) as error:
            if len(waiting) > MOST_WAITING:
                self._writer.lose(len(waiting) - MOST_WAITING, str(error))
            self._unwritten, self._connection = waiting[-MOST_WAITING:], None
            if entries:
                _log.error("%d rows of the ledger wait for the disk: %s: %s", len(waiting), self.path, error)
            return
        self._unwritten = []
        for _, written in waiting:
            if written is not None:
                written()


def open_ledger(path: Path) -> sqlite3.Connection:
    """Return a connection to a ledger, which is made if it is not there. Raises sqlite3.Error and OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(0o600)
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the process loses nothing
    connection.executescript(_TABLES)
    there = {name for _, name, *_ in connection.execute("PRAGMA table_info(requests)")}
    for name, value in _LATER.items():
        if name not in there:
            connection.execute(f"ALTER TABLE requests ADD COLUMN {_COLUMN[name]} DEFAULT {value}")
    return connection


def existing_ledger(path: Path) -> sqlite3.Connection | None:
    """Return a connection to a ledger; None if it is not there. Raises ValueError."""
    try:
        return open_ledger(path) if path.exists() else None
    except sqlite3.Error as error:
        raise ValueError(f"the ledger {path} cannot be read: {error}; move it away to begin a new one") from None


def _expire(connection: sqlite3.Connection, days: int) -> None:
    oldest = datetime.datetime.now(datetime.UTC).timestamp() - days * 86_400
    with connection:
        connection.execute("DELETE FROM requests WHERE began < ?", (oldest,))


def quota_counters(connection: sqlite3.Connection, now: float) -> dict[str, int]:
    """Return what the tenants have used in the day and the month of `now`, by the quotas' keys."""
    found: dict[str, int] = {}
    month, _ = window("month", now)
    day, ends = window("day", now)
    first = datetime.datetime.strptime(month, "%Y-%m").replace(tzinfo=datetime.UTC).timestamp()
    query = "SELECT tenant, SUM(prompt + output), SUM(nano) FROM requests WHERE began >= ? GROUP BY tenant"
    for tenant, tokens, nano in connection.execute(query, (first,)):
        found[counter_key(tenant, "tokens", "month", month)] = tokens
        found[counter_key(tenant, "money", "month", month)] = nano
    for tenant, tokens, _ in connection.execute(query, (ends - 86_400,)):
        found[counter_key(tenant, "tokens", "day", day)] = tokens
    return found


def rows_since(path: Path, since: float) -> list[Settlement]:
    """Return what requests have used that began after a time, by the ids of their rows. Raises ValueError."""
    if (connection := existing_ledger(path)) is None:
        return []
    query = "SELECT id, tenant, prompt + output, nano FROM requests WHERE began >= ?"
    rows = connection.execute(query, (since,)).fetchall()
    connection.close()
    return [Settlement(row_id, tenant, Amounts(tokens, nano)) for row_id, tenant, tokens, nano in rows]


def summary(
    connection: sqlite3.Connection, by: Sequence[str], since: float, until: float, tenant: str = ""
) -> list[tuple[Any, ...]]:
    """Return the sums of the requests that began in an interval: the groups of `by`, the number of requests, and the
    fields of `SUMMED`."""
    groups = ", ".join(GROUPS[name] for name in by)
    sums = ", ".join(f"SUM({name})" for name in _SUMS)
    query = f"SELECT {groups}, COUNT(*), {sums} FROM requests WHERE began >= ? AND began < ?"
    arguments: list[object] = [since, until]
    if tenant:
        query += " AND tenant = ?"
        arguments.append(tenant)
    return connection.execute(f"{query} GROUP BY {groups} ORDER BY {groups}", arguments).fetchall()


SUMMED = ("requests", *_SUMS)


def usage_by_hour(path: Path, since: float, tenant: str) -> list[dict[str, Any]]:
    """Return the sums of each tenant and hour since a time; `tenant`: only its own."""
    groups = ("tenant", "hour")
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=_BUSY_SECONDS)
    rows = summary(connection, groups, since, math.inf, tenant)
    connection.close()
    return [dict(zip((*groups, *SUMMED), row, strict=True)) for row in rows]


def rows_of(
    connection: sqlite3.Connection, since: float, until: float, where: Mapping[str, object], last: int = -1
) -> Iterator[tuple[object, ...]]:
    """Yield the last requests that began in an interval and fulfil conditions such as {"status >= ?": 400}, in order,
    with the columns `FIELDS`."""
    conditions = " AND ".join(["began >= ?", "began < ?", *where])
    newest = f"SELECT {', '.join(FIELDS)} FROM requests WHERE {conditions} ORDER BY began DESC LIMIT ?"
    yield from connection.execute(f"SELECT * FROM ({newest}) ORDER BY began", (since, until, *where.values(), last))
