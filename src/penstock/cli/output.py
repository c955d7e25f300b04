"""What a command writes into a file that the user names."""

import os
from pathlib import Path


def check_file(flag: str, path: str | None) -> None:
    """Before the work whose result is to be written. ValueError where it could not be."""
    if path is None:
        return
    file = Path(path)
    if file.is_dir():
        raise _refused(flag, path, "it is a folder")
    if not file.parent.is_dir():
        raise _refused(flag, path, f"there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _refused(flag, path, "writing is not allowed there")


def write_file(flag: str, path: str | None, text: str) -> None:
    """Nothing where no path is given. ValueError where it cannot be written."""
    if path is None:
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise _refused(flag, path, str(error.strerror).lower()) from None


def _refused(flag: str, path: str, why: str) -> ValueError:
    return ValueError(f"{flag} {path} cannot be written: {why}; name a file elsewhere")
