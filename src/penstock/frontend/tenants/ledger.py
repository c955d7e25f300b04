"""The ledger: a row for each request, with what it has used and what it costs.

A thread writes rows in batches, so that no request waits for the disk. A
committed row survives a crash of the server. With several API processes the supervisor writes the rows of all.
"""

import contextlib
import datetime
import logging
import queue
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.frontend.tenants.quotas import counter_key, window

FILE = "ledger.sqlite3"
MOST_WAITING = 100_000  # rows that are not written yet
_BATCH_SECONDS = 0.2  # in which rows are gathered for one commit
_BUSY_SECONDS = 30.0  # that another process's commit may take
_RETRY_SECONDS = 5.0  # after an error of the disk
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
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    nano: int = 0  # its cost, in billionths of the currency
    currency: str = ""


FIELDS = LedgerRow.__struct_fields__
_TYPES = {str: "TEXT", float: "REAL", int: "INTEGER"}
_COLUMNS = ", ".join(f"{name} {_TYPES[LedgerRow.__annotations__[name]]}" for name in FIELDS if name != "id")
_TABLES = f"""
    CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, {_COLUMNS}) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS requests_by_time ON requests (began, tenant);
"""
_INSERT = f"INSERT OR IGNORE INTO requests ({', '.join(FIELDS)}) VALUES ({', '.join('?' * len(FIELDS))})"
_SUMS = (
    *("prompt", "cached", "computed", "output", "reasoning", "rejected", "repeated"),
    *("step_ms", "block_seconds", "nano"),
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
        """Rows are kept for `days`."""
        self.path = path
        self.lost = 0  # rows, because too many waited
        self._days = days
        self._rows: queue.Queue[LedgerRow | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="penstock-ledger", daemon=True)
        self._thread.start()

    def add(self, row: LedgerRow) -> None:
        """Write a row soon. Never blocks."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.lost += 1
            if self.lost & (self.lost - 1) == 0:
                _log.error("%d requests are missing in the ledger, as %s is not written", self.lost, self.path)

    def close(self) -> None:
        """Write what is left. Blocks for at most a minute."""
        with contextlib.suppress(queue.Full):  # the disk fails, and so will this
            self._rows.put(None, timeout=1)
            self._thread.join(60)

    def _run(self) -> None:
        rows: list[LedgerRow] = []
        connection = self._open_early()
        while True:
            last = self._gather(rows)
            while rows:
                try:
                    if connection is None:
                        connection = open_ledger(self.path)
                        _expire(connection, self._days)
                    with connection:
                        connection.executemany(_INSERT, [msgspec.structs.astuple(row) for row in rows])
                except (sqlite3.Error, OSError) as error:
                    _log.error("%d rows of the ledger wait for the disk: %s: %s", len(rows), self.path, error)
                    if last:
                        return
                    threading.Event().wait(_RETRY_SECONDS)
                    connection = None
                else:
                    rows = []
            if last:
                if connection is not None:
                    connection.close()
                return

    def _open_early(self) -> sqlite3.Connection | None:
        """Open the ledger before the first row, so that there is one to read. None: the first row tries again."""
        try:
            connection = open_ledger(self.path)
            _expire(connection, self._days)
        except (sqlite3.Error, OSError) as error:
            _log.error("the ledger cannot be opened: %s: %s", self.path, error)
            return None
        return connection

    def _gather(self, rows: list[LedgerRow]) -> bool:
        """Add the next rows to `rows`. Return True if they are the last ones."""
        row = self._rows.get()
        if row is not None:
            threading.Event().wait(_BATCH_SECONDS)
        while row is not None:
            rows.append(row)
            try:
                row = self._rows.get_nowait()
            except queue.Empty:
                return False
        return True


def open_ledger(path: Path) -> sqlite3.Connection:
    """Return a connection to a ledger, which is made if it is not there. Raises sqlite3.Error and OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(0o600)
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the process loses nothing
    connection.executescript(_TABLES)
    return connection


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


def summary(
    connection: sqlite3.Connection, by: Sequence[str], since: float, until: float, tenant: str = ""
) -> list[tuple[object, ...]]:
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


def rows_of(
    connection: sqlite3.Connection, since: float, until: float, where: Mapping[str, object], last: int = -1
) -> Iterator[tuple[object, ...]]:
    """Yield the last requests that began in an interval and fulfil conditions such as {"status >= ?": 400}, in order,
    with the columns `FIELDS`."""
    conditions = " AND ".join(["began >= ?", "began < ?", *where])
    newest = f"SELECT {', '.join(FIELDS)} FROM requests WHERE {conditions} ORDER BY began DESC LIMIT ?"
    yield from connection.execute(f"SELECT * FROM ({newest}) ORDER BY began", (since, until, *where.values(), last))
