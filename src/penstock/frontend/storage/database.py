"""One SQLite database in a folder of its own, used by one server: by one process of it, or by several."""

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.config import ServerConfig
from penstock.config.state import state_home
from penstock.frontend.errors import APIError
from penstock.frontend.limits import RequestLimits
from penstock.frontend.storage import responses
from penstock.frontend.storage.room import FILE, StorageRoom
from penstock.frontend.storage.spare import Spare, is_full
from penstock.frontend.storage.tables import upgrade, version_of
from penstock.observe.metrics import STORAGE_EVENTS

T = TypeVar("T")

_PAGE = 4096  # bytes
_RESERVE = 1 << 20  # bytes
_CHECKPOINT = "wal_checkpoint(TRUNCATE)"
_VACUUM = "incremental_vacuum(1024)"  # pages; the log of moving them must fit in the spare
_BUSY_SECONDS = 30.0  # that another process's transaction may take
_WARN_SECONDS = 60.0  # between lines about responses that made room
_log = logging.getLogger("penstock.storage")


class Database:
    """Runs transactions, one after the other, in a thread. The file is made by the first one."""

    def __init__(self, folder: Path, limit: int, lock: int | None = None, counts: dict[str, int] | None = None) -> None:
        """`limit` is the most bytes that the file may have. `lock` is what `lock_folder` returned, for processes that
        share the file; None: this one is alone, and locks the folder when it first uses it. `counts` is where the
        events of `penstock.observe.metrics.STORAGE_EVENTS` are counted."""
        self.folder = folder
        self._limit = limit
        self.room = StorageRoom(folder, limit)
        self._counts = dict.fromkeys(STORAGE_EVENTS, 0) if counts is None else counts
        self._thread = ThreadPoolExecutor(1, "penstock-storage")
        self._connection: sqlite3.Connection | None = None
        self._lock = -1 if lock is None else lock  # the file descriptor that keeps other servers out
        self._shared = lock is not None
        self._spare = Spare(folder)
        self._deleted = 0  # responses, since the last line of the log about them
        self._warned = -_WARN_SECONDS  # when that was, on time.monotonic()

    @property
    def exists(self) -> bool:
        """False if nothing was ever stored."""
        return self._path.exists()

    async def run(self, work: Callable[[sqlite3.Connection], T], *, reserve: bool = False) -> T:
        """Returns the result of one transaction. If `work` raises, nothing of it is kept. If there is no room, the
        oldest stored responses are deleted. With `reserve`, it may use some bytes beyond the limit, and the spare of a
        full disk: ends of batches and deletions must be stored even if the storage is full. `work` may be called again,
        so it must change nothing but the database.

        Raises APIError 507 if the database or the disk is full, and 503 if the folder cannot be used.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work, reserve)

    async def close(self) -> None:
        """Waits for the transaction that runs, and closes the file. `run` must not be called again."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    @property
    def _path(self) -> Path:
        return self.folder / FILE

    def _transact(self, work: Callable[[sqlite3.Connection], T], reserve: bool) -> T:
        try:
            if self._connection is None:
                self._connection = self._open()
            if not reserve:
                return self._instead_of_responses(self._connection, work)
            return self._beyond_the_limit(self._connection, work)
        except (sqlite3.Error, OSError) as error:
            raise self._explain(error) from error

    def _instead_of_responses(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
        """Deletes stored responses, the oldest first, for as long as there is no room."""
        deleted = 0
        while True:
            try:
                result = self._once(connection, work)
                break
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                found = self._beyond_the_limit(connection, responses.drop_oldest)
                deleted += found
                if not found:
                    raise
        if deleted:
            self._warn_of(deleted)
        return result

    def _warn_of(self, deleted: int) -> None:
        self._deleted += deleted
        self._counts["responses_deleted"] += deleted
        if time.monotonic() - self._warned >= _WARN_SECONDS:
            _log.warning(
                "the storage in %s is full (at most %d bytes): the %d oldest responses were deleted to make room",
                *(self.folder, self._limit, self._deleted),
            )
            self._warned, self._deleted = time.monotonic(), 0

    def _beyond_the_limit(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
        self._bound(connection, self._limit + _RESERVE)
        try:
            return self._surely(connection, work)
        finally:
            self._bound(connection, self._limit)

    def _once(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
        with connection:
            if self._shared:  # what `work` reads before it writes must still hold then
                connection.execute("BEGIN IMMEDIATE")
            return work(connection)

    def _surely(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
        """Uses the spare if the disk is full."""
        try:
            result = self._once(connection, work)
        except sqlite3.Error as error:
            if not is_full(error):
                raise
            with self._spare.alone():
                self._spare.release()
                try:
                    return self._once(connection, work)
                finally:
                    self._shrink(connection)
                    self._spare.fill()
        if self._spare.tight:
            with self._spare.alone():
                self._shrink(connection)
                self._spare.fill()
        return result

    def _shrink(self, connection: sqlite3.Connection) -> None:
        """Gives the disk what the log and, after a deletion, the main file do not need. Each step makes room for the
        next one, and is left out if it lacks room itself."""
        for step in (_CHECKPOINT, *(_VACUUM, _CHECKPOINT) * 16):
            try:
                connection.execute(f"PRAGMA {step}").fetchall()
                if step == _CHECKPOINT and not connection.execute("PRAGMA freelist_count").fetchone()[0]:
                    return
            except sqlite3.Error as error:
                _log.debug("%s: %s", step, error)

    def _open(self) -> sqlite3.Connection:
        if self._lock < 0:
            self._lock = lock_folder(self.folder)
        with self._spare.alone():  # SQLite does not wait when two processes change to WAL at once
            self._path.touch(0o600)
            try:
                return self._connect()
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                self._spare.release()  # a new log needs some pages
                return self._connect()
            finally:
                self._spare.fill()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, check_same_thread=False)
        try:
            version_of(connection)  # before anything is changed
            connection.execute(f"PRAGMA page_size = {_PAGE}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the process loses nothing
            connection.execute("PRAGMA journal_size_limit = 67108864")
            self._bound(connection, self._limit)
            upgrade(connection)
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
        if is_full(error):
            self._counts["full"] += 1
            return APIError(507, f"the server's storage is full: {self.room.why_full()}", code="storage_full")
        self._counts["unavailable"] += 1
        hint = "; move penstock.sqlite3 away or name another --state-dir" if _is_unusable(error) else ""
        _log.error("%s cannot be used: %s%s", self.folder, error, hint)
        return APIError(503, f"the server's storage cannot be used: {error}", code="storage_unavailable")


def _is_unusable(error: Exception) -> bool:
    """True if the file is no database, is damaged or has other tables: waiting does not help."""
    return type(error) is sqlite3.DatabaseError or "no such column" in str(error)


def vacuum(connection: sqlite3.Connection) -> None:
    """Gives the disk some of the pages that deletions have freed."""
    connection.execute(f"PRAGMA {_VACUUM}").fetchall()


def storage_folder(config: ServerConfig) -> Path | None:
    """The folder of a server's storage; None if it stores nothing. The default has the port in its name: servers of one
    machine have different ports, and a server that is started again has the same one."""
    if config.state_dir == "none":
        return None
    if config.state_dir == "auto":
        return (state_home(os.environ) / "penstock" / f"port-{config.port}").absolute()
    return Path(config.state_dir).absolute()


def lock_folder(folder: Path) -> int:
    """Makes the folder, and returns the descriptor of a lock that keeps other servers out. Raises APIError 503."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    return lock


def open_storage(
    config: ServerConfig, limits: RequestLimits, lock: int | None = None, counts: dict[str, int] | None = None
) -> Database | None:
    """The storage of a server; None if it stores nothing. See Database for `lock` and `counts`."""
    folder = storage_folder(config)
    return None if folder is None else Database(folder, limits.max_stored_bytes, lock, counts)


class StorageOnly:
    """Background work of a process that runs no batches: it only closes the storage at the end."""

    def __init__(self, storage: Database) -> None:
        self._storage = storage

    async def run(self) -> None:
        """Does nothing until it is cancelled."""
        await asyncio.Event().wait()

    def wake(self) -> None:
        """There is nothing to do."""

    async def close(self) -> None:
        await self._storage.close()


def storage_of(storage: Database | None) -> Database:
    """Raises APIError 404 if the server stores nothing."""
    if storage is None:
        raise APIError(
            404, "this server stores no responses, files or batches (--state-dir none)", code="storage_disabled"
        )
    return storage
