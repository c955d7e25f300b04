"""Progress on standard error, of work whose size is known."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.observe.reporting import reporting

LINE_SECONDS = 10.0  # between lines about work of minutes, if there is no terminal


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
def work_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows long work of `total` steps, with the time left, while the block runs. Yields a function to call with the
    steps since the last call. Without a terminal there are lines."""
    if sys.stderr.isatty():
        from rich.console import Console  # as above
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.advance(task, steps)
    else:
        done = 0
        with reporting(f"{what}: 0 of {total}", seconds=LINE_SECONDS) as say:

            def report(steps: int) -> None:
                nonlocal done
                done += steps
                say(f"{what}: {done} of {total}")

            yield report


@contextmanager
def download_progress(what: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Shows a download of `total` bytes, `done` of which were there before, while the block runs.

    Yields a function to call with the bytes so far, a few times a second. Without a terminal there are lines.
    """
    if sys.stderr.isatty():
        from rich.console import Console  # as above
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done)
            yield lambda size: bar.update(task, completed=size)
    else:
        began = time.monotonic()
        with reporting(what) as say:

            def report(size: int) -> None:
                speed = (size - done) / max(time.monotonic() - began, 1e-3) / 1e6
                say(f"{what}: {size / 1e6:,.0f} of {total / 1e6:,.0f} MB, {speed:,.1f} MB/s")

            yield report
