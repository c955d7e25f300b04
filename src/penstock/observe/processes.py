"""Memory and processor time of other processes, from /proc."""

import os
from pathlib import Path

_PROC = Path("/proc")


def usage(pid: int) -> tuple[int, float] | None:
    """Returns the bytes of resident memory and the seconds of processor time of a process and its children; None if it
    has ended or cannot be seen. Memory that they share counts for each."""
    found = usage_of_one(pid)
    for child in () if found is None else _children(pid):
        more = usage_of_one(child)
        if found is not None and more is not None:
            found = found[0] + more[0], found[1] + more[1]
    return found


def usage_of_one(pid: int) -> tuple[int, float] | None:
    """Returns the same without children."""
    try:
        # The name in parentheses may hold spaces; the fields after it begin with the third.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), seconds
    except (OSError, ValueError, IndexError):
        return None


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split()]
    except (OSError, ValueError):
        return []
