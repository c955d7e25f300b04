"""Shows on a terminal that a command works, and leaves nothing behind."""

import threading
import time
from types import TracebackType
from typing import IO

from penstock.cli.chat.safe_text import one_line

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
DELAY = 0.4  # seconds without a spinner: most starts are shorter than it takes to read one
PERIOD = 0.1
MOST = 60  # characters: a line that wraps could not be removed
CLEAR_LINE = "\r\x1b[K"


class Spinner:
    """Shows a text with the seconds so far, from a thread, so that imports do not stop it. Only on a terminal."""

    def __init__(self, stream: IO[str], text: str, *, shown: bool) -> None:
        self._stream, self._text = stream, one_line(text, MOST)
        self._shown = shown
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Spinner":
        if self._shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Removes the spinner. May be called twice."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        if self._ended.wait(DELAY):
            return
        frame = 0
        while not self._ended.is_set():
            seconds = time.monotonic() - began
            self._stream.write(f"{CLEAR_LINE}{FRAMES[frame % len(FRAMES)]} {self._text} ({seconds:.0f} s)")
            self._stream.flush()
            frame += 1
            self._ended.wait(PERIOD)
        self._stream.write(CLEAR_LINE)
        self._stream.flush()
