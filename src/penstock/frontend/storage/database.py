"""One SQLite database in a folder of its own, used by one process and from one thread."""

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.config import ServerConfig
from penstock.config.state import state_home
from penstock.frontend.errors import APIError
from penstock.frontend.limits import RequestLimits

T = TypeVar("T")

_PAGE = 4096  # bytes
_RESERVE = 1 << 20  # bytes
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT, expires INTEGER, previous TEXT, depth INTEGER, bytes INTEGER,
    input BLOB, output BLOB, rest BLOB);
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, name TEXT, purpose TEXT, bytes INTEGER,
    created INTEGER, expires INTEGER, complete INTEGER);
CREATE TABLE IF NOT EXISTS chunks (file TEXT, number INTEGER, data BLOB, PRIMARY KEY (file, number));
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, open INTEGER, expires INTEGER, fields BLOB);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, number);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, number);
CREATE INDEX IF NOT EXISTS open_batches ON batches (open) WHERE open = 1;
CREATE INDEX IF NOT EXISTS responses_end ON responses (expires);
"""
_log = logging.getLogger("penstock.storage")


class Database:
    """Runs transactions, one after the other, in a thread. The file is made by the first one."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`limit` is the most bytes that the file may have."""
        self.folder = folder
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, "penstock-storage")
        self._connection: sqlite3.Connection | None = None
        self._lock = -1  # the file descriptor that keeps other servers out

    @property
    def exists(self) -> bool:
        """False if nothing was ever stored."""
        return self._path.exists()

    async def run(self, work: Callable[[sqlite3.Connection], T], *, reserve: bool = False) -> T:
        """Returns the result of one transaction. If `work` raises, nothing of it is kept. With `reserve`, it may use
        some bytes beyond the limit: the end of a batch must be stored even if the storage is full.

        Raises APIError 507 if the database or the disk is full, and 503 if the folder cannot be used.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work, reserve)

    async def close(self) -> None:
        """Waits for the transaction that runs, and closes the file. `run` must not be called again."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    @property
    def _path(self) -> Path:
        return self.folder / "penstock.sqlite3"

    def _transact(self, work: Callable[[sqlite3.Connection], T], reserve: bool) -> T:
        try:
            if self._connection is None:
                self._connection = self._open()
            if reserve:
                self._bound(self._connection, self._limit + _RESERVE)
            try:
                with self._connection:
                    return work(self._connection)
            finally:
                if reserve:
                    self._bound(self._connection, self._limit)
        except (sqlite3.Error, OSError) as error:
            raise self._explain(error) from error

    def _open(self) -> sqlite3.Connection:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._lock < 0:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise APIError(
                    503,
                    "another server uses the folder in which this one stores responses, files and batches; give each "
                    "its own --state-dir",
                    code="storage_unavailable",
                ) from None
            self._lock = lock
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, check_same_thread=False)
        try:
            connection.execute(f"PRAGMA page_size = {_PAGE}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the process loses nothing
            connection.execute("PRAGMA journal_size_limit = 67108864")
            self._bound(connection, self._limit)
            connection.executescript(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _bound(self, connection: sqlite3.Connection, limit: int) -> None:
        connection.execute(f"PRAGMA max_page_count = {max(limit // _PAGE, 1)}")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _explain(self, error: Exception) -> APIError:
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC:
            return APIError(
                507,
                f"the server's storage is full: its limit is {self._limit} bytes, and its disk may have less; delete "
                "files or responses, or wait until some expire",
                code="storage_full",
            )
        _log.error("%s cannot be used: %s", self.folder, error)
        return APIError(503, f"the server's storage cannot be used: {error}", code="storage_unavailable")


def open_storage(config: ServerConfig, limits: RequestLimits) -> Database | None:
    """The storage of a server; None if it stores nothing. The default folder has the port in its name: servers of one
    machine have different ports, and a server that is started again has the same one."""
    if config.state_dir == "none":
        return None
    folder = Path(config.state_dir)
    if config.state_dir == "auto":
        folder = state_home(os.environ) / "penstock" / f"port-{config.port}"
    return Database(folder.absolute(), limits.max_stored_bytes)


def storage_of(storage: Database | None) -> Database:
    """Raises APIError 404 if the server stores nothing."""
    if storage is None:
        raise APIError(
            404, "this server stores no responses, files or batches (--state-dir none)", code="storage_disabled"
        )
    return storage
