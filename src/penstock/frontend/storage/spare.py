"""Bytes of the disk that the storage keeps for the time when the disk is full."""

import contextlib
import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

# The log may have 4 MiB that are not in the main file yet, and some for the last transaction and the one that frees.
_SPARE = 8 << 20
_LEAST = 64 << 10  # bytes that are worth a file


class Spare:
    """A file without content, as large as possible. All processes of a server share it; a process must hold `alone` to
    change it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "penstock.sqlite3-spare"
        self._guard = folder / "penstock.sqlite3-guard"

    @property
    def tight(self) -> bool:
        """True if the disk has less than another spare beside this one, or had less than this one needs."""
        room = os.statvfs(self._path.parent)
        return room.f_bavail * room.f_frsize < _SPARE or self._size() < self._wanted()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other process of the server opens the storage or uses the spare."""
        # SQLite's own files will not do: who closes a second descriptor of one loses all of SQLite's locks on it.
        guard = os.open(self._guard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
            yield
        finally:
            os.close(guard)

    def fill(self) -> None:
        """Takes what the disk has, up to the size of a spare. Other errors than a full disk leave it as it is, too."""
        with contextlib.suppress(OSError):
            room = os.statvfs(self._path.parent)
            size = min(self._wanted(), self._size() + room.f_bavail * room.f_frsize)
            spare = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while size >= _LEAST:
                    try:
                        os.posix_fallocate(spare, 0, size)
                        break
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        size //= 2
            finally:
                os.close(spare)

    def release(self) -> None:
        """Gives its bytes to the disk."""
        self._path.unlink(missing_ok=True)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _wanted(self) -> int:
        room = os.statvfs(self._path.parent)
        return min(_SPARE, room.f_blocks * room.f_frsize // 2)


def is_full(error: BaseException) -> bool:
    """True if the database has its largest size, or the disk has no room."""
    code = getattr(error, "sqlite_errorcode", None)
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE) or getattr(error, "errno", None) == errno.ENOSPC
