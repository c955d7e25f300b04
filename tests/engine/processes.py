"""Looking at processes through /proc."""

import contextlib
import gc
import os
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The direct children of a process, zombies included."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _stat(int(folder.name))[1] == str(pid):
                found.append(int(folder.name))
    return found


def command_line(pid: int) -> str:
    """What a process was started with, a space between words; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").rstrip()
    return ""


def descriptors() -> int:
    """The open files of this process, without those of garbage that earlier tests have left: it may be collected at any
    moment, and would change the count."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _stat(pid: int) -> list[str]:
    """State, parent and more; what comes before, the name, may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
