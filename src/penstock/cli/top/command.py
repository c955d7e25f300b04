"""Implements `penstock top`."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.cli.top.scrape import NoServer, Scrape, scrape, server_url
from penstock.config.texts import checked_flag

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

WINDOW = 10.0  # seconds that the current figures are about


def top(url: str, once: bool, interval: float, api_key: str | None) -> None:
    """Shows what a server does until Ctrl-C or q; with `once`, or without a terminal, one time, about one interval.

    Raises ValueError if no server answers at first. Later it waits until one does.
    """
    from rich.console import Console

    from penstock.cli.top.screen import screen

    address, console, api_key = server_url(url), Console(highlight=False), checked_flag("--api-key", api_key)
    first = scrape(address, api_key)
    if once or not console.is_terminal:
        time.sleep(interval)
        console.print(screen(address, scrape(address, api_key), first))
        return
    _watch(address, api_key, interval, first, console)


def _watch(url: str, api_key: str | None, interval: float, first: Scrape, console: "Console") -> None:
    from rich.live import Live

    from penstock.cli.top.screen import screen

    # SIGINT is blocked while Live switches to its own screen and back: an interrupt in between would leave the terminal
    # on the wrong screen.
    _hold_ctrl_c(True)
    with _keys() as keys, Live(screen(url, first, None), console=console, screen=True, auto_refresh=False) as live:
        try:
            _hold_ctrl_c(False)
            _update(live, url, api_key, interval, first, keys)
        except KeyboardInterrupt:
            pass
        _hold_ctrl_c(True)  # until this process ends


def _update(live: "Live", url: str, api_key: str | None, interval: float, first: Scrape, keys: bool) -> None:
    """Scrapes the server once an interval and shows it, until q is pressed. Raises KeyboardInterrupt."""
    from penstock.cli.top.screen import screen

    seen = deque([first])
    trouble = ""
    while not _wait(interval, keys):
        try:
            seen.append(scrape(url, api_key))
            trouble = ""
        except NoServer as error:
            trouble = f"{error} Trying again."
        while len(seen) > 2 and seen[-1].moment - seen[1].moment >= WINDOW:
            seen.popleft()
        before = seen[0] if len(seen) > 1 else None
        live.update(screen(url, seen[-1], before, trouble), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[bool]:
    """While it lasts, keys arrive without Enter and do not appear. Yields False if there is no terminal to read."""
    if not sys.stdin.isatty():
        yield False
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin, termios.TCSANOW)  # Ctrl-C still interrupts
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _wait(seconds: float, keys: bool) -> bool:
    """Returns True as soon as q is pressed, and False after `seconds`."""
    end = time.monotonic() + seconds
    while keys and (left := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            pressed = os.read(sys.stdin.fileno(), 64)
            if b"q" in pressed:
                return True
            keys = bool(pressed)  # a terminal that is gone is always readable, and has nothing
    time.sleep(max(0.0, end - time.monotonic()))
    return False


def _hold_ctrl_c(held: bool) -> None:
    """Blocks or unblocks SIGINT. One that arrives while it is blocked is delivered when it is unblocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK if held else signal.SIG_UNBLOCK, {signal.SIGINT})
