"""Progress on standard error: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_LINE = 2.0  # seconds


@contextmanager
def progress_bar(what: str, total: int, *, wanted: bool, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Shows a bar while the block runs, if it is `wanted` and stderr is a terminal.

    Yields a function that any thread may call with the progress since the last call, in units of `total`.
    """
    if not wanted or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console  # imported only to show a bar, as it takes time
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

    figures = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *figures)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def download_progress(what: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Shows a download of `total` bytes, `done` of which were there before, while the block runs.

    Yields a function to call with the bytes so far, a few times a second. Without a terminal it prints a line after two
    seconds, and later fewer and fewer: one for each tenth of the time so far.
    """
    if sys.stderr.isatty():
        from rich.console import Console  # as above
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda size: bar.update(task, completed=size)
    else:
        yield _Lines(what, total, done)


class _Lines:
    def __init__(self, what: str, total: int, done: int) -> None:
        self._what = what
        self._total = total
        self._before = done
        self._started = time.monotonic()
        self._next = self._started + FIRST_LINE

    def __call__(self, size: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        taken = now - self._started
        self._next = now + max(FIRST_LINE, taken / 10)
        speed = (size - self._before) / taken / 1e6
        print(
            f"{self._what}: {size / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {speed:,.1f} MB/s",
            file=sys.stderr,
            flush=True,
        )
