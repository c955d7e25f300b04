"""Checks files and folders that the user names."""

import os
from pathlib import Path


def check_file(flag: str, path: str | None) -> None:
    """Raises ValueError if `path` cannot be written. Call it before the work whose result goes there."""
    if path is None:
        return
    if not path:
        raise unwritable(flag, "''", "it is empty")
    file = Path(path)
    if file.is_dir():
        raise unwritable(flag, path, "it is a folder")
    if not file.parent.is_dir():
        raise unwritable(flag, path, f"there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise unwritable(flag, path, "permission denied")


def check_folder(flag: str, path: str) -> None:
    """Raises ValueError if `path`, or the nearest folder above it that exists, is not a folder that can be written."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{flag} is {path!r}: it is not a folder; name another one")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} is {path!r}: permission denied; name another folder")


def unwritable(flag: str, path: str, why: str) -> ValueError:
    """Returns the error for a file that cannot be written."""
    return ValueError(f"{flag} {path} cannot be written: {why}; name another file")
