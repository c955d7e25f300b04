"""Progress bars on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
