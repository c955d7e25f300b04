"""Measures how much the storage holds, and how much it may still take."""

import os
from pathlib import Path

FILE = "penstock.sqlite3"


class StorageRoom:
    """The storage's file with its log, its limit, and its disk. Sizes are in bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def used(self) -> int:
        """The size of the file and its log; 0 if nothing was ever stored."""
        return sum(_size(self.folder / (FILE + end)) for end in ("", "-wal"))

    def free(self) -> int:
        """Returns how many bytes may still be stored: what the limit leaves, or the disk if that has less."""
        return max(min(self._left_by_limit(), self._left_on_disk()), 0)

    def why_full(self) -> str:
        """Names what is full, the disk or the limit, and what to do."""
        left = self._left_on_disk()
        if left < self._left_by_limit():
            return (
                f"its disk has {left} bytes left; make room there, delete files or responses, or wait until some expire"
            )
        return f"it has its limit of {self.limit} bytes; delete files or responses, or wait until some expire"

    def _left_by_limit(self) -> int:
        return self.limit - _size(self.folder / FILE)

    def _left_on_disk(self) -> int:
        there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        room = os.statvfs(there)
        return room.f_bavail * room.f_frsize


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
