"""What other servers on this machine may still take of its memory.

A KV cache takes its memory as it is used, so a server that starts would count what an earlier one was promised as free.
Each server writes what it may take to a file with its process id. A file whose process has ended has no effect.
"""

import contextlib
import os
from pathlib import Path

from penstock.observe.processes import usage

FOLDER = Path("/dev/shm")  # memory that all processes see, and that a restart of the machine empties


def promise(total: int, folder: Path = FOLDER) -> None:
    """Notes that this process and its children may take `total` bytes. Does nothing if no file can be written."""
    with contextlib.suppress(OSError):
        own = _own(folder)
        own.mkdir(mode=0o700, exist_ok=True)
        if own.stat().st_uid == os.getuid():  # else it is a trap: anyone may create folders there
            (own / str(os.getpid())).write_text(f"{_started(os.getpid())} {total}")


def promised(folder: Path = FOLDER) -> int:
    """Returns the bytes that other servers of this user may still take."""
    left = 0
    for file in _own(folder).glob("*"):
        try:
            started, total = file.read_text().split()
            used = usage(int(file.name))
            if used is None or _started(int(file.name)) != started:
                file.unlink()
            elif file.name != str(os.getpid()):
                left += max(int(total) - used[0], 0)
        except (OSError, ValueError):  # another process removes it or writes it just now
            continue
    return left


def _own(folder: Path) -> Path:
    return folder / f"penstock-{os.getuid()}"


def _started(pid: int) -> str:
    """When a process started: process ids are used again."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
