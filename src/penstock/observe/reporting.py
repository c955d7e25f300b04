"""Says on standard error what a command waits for."""

import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TERMINAL_SECONDS = 0.5  # between updates of the line on a terminal
FIRST_SECONDS = 0.7  # until the first line elsewhere: a command has imported for half a second before
FILE_SECONDS = 1.2  # between lines there: with the above, less than 2 s pass, which look like a program that hangs


@contextmanager
def reporting(text: str, *, seconds: float = FILE_SECONDS) -> Iterator[Callable[[str], None]]:
    """Shows `text` and the seconds so far while the block runs. Yields a function that changes the text.

    On a terminal it is one line, which is erased at the end. Elsewhere it is a line every few `seconds`, and short work
    shows nothing. A thread writes, so the block may keep its own busy.
    """
    done = threading.Event()
    began = time.monotonic()
    current = text
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    shown = False

    def change(new: str) -> None:
        nonlocal current
        current = new

    def write(line: str) -> None:
        if not _has_room():
            return
        try:
            print(line, end="" if terminal else "\n", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # the terminal is gone, or the stream is closed
            done.set()

    def show() -> None:
        nonlocal shown
        pause = TERMINAL_SECONDS if terminal else FIRST_SECONDS
        while not done.wait(pause):
            shown = True
            line = f"{current} ({time.monotonic() - began:.0f} s)"
            if terminal:  # the cursor stays in front, so that a line of a log replaces this one
                line = f"{line[: shutil.get_terminal_size().columns - 1]}\x1b[K\r"
            else:
                pause = seconds
            write(line)

    writer = threading.Thread(target=show, name="reporting", daemon=True)
    writer.start()
    try:
        yield change
    finally:
        done.set()
        writer.join()
        if terminal and shown:
            write("\x1b[K")


def _has_room() -> bool:
    """False if standard error is a pipe that is full, as its reader has stopped: writing to it would block."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # no file, or a closed one
        return True
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    return bool(ready.poll(0))
