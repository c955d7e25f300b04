"""A command in a real terminal: a pty, keys, and what appears."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from types import TracebackType

from tests.e2e.bound import bound

SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_]|\][^\x07]*\x07)")
ROWS, COLUMNS = 40, 90
UP, CTRL_C, CTRL_D, ENTER = "\x1b[A", "\x03", "\x04", "\r"


def without_waiting(errors: str) -> str:
    """Standard error without the lines that say what a command waits for, which depend on how fast the machine is."""
    return re.sub(r"^[^\n]* \(\d+ s\)\n", "", errors, flags=re.MULTILINE)


class Terminal:
    """Runs `penstock` with `arguments`. Its history is below `state`."""

    def __init__(self, *arguments: str, state: str, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        env |= {"TERM": "xterm-256color", "XDG_STATE_HOME": state, "PROMPT_TOOLKIT_NO_CPR": "1", **environ}
        self.process = subprocess.Popen(
            bound([sys.executable, "-m", "penstock", *arguments]),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(theirs)
        self.raw = ""  # everything so far
        self._seen = 0  # characters that `until` has returned

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def paste(self, text: str) -> None:
        """Sends text as a terminal with bracketed paste does."""
        self.press(f"\x1b[200~{text}\x1b[201~")

    def until(self, text: str, timeout: float = 60) -> str:
        """Returns what appears up to `text`, without colours and movements of the cursor."""
        deadline = time.monotonic() + timeout
        while True:
            shown = SEQUENCE.sub("", self.raw)[self._seen :]
            if text in shown:
                end = shown.index(text) + len(text)
                self._seen += end
                return shown[:end]
            assert time.monotonic() < deadline, f"no {text!r} in {shown!r}"
            if select.select([self._ours], [], [], 0.2)[0]:
                try:
                    self.raw += os.read(self._ours, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    raise AssertionError(f"it ended; no {text!r} in {shown!r}") from None

    def echoes(self) -> bool:
        """True if the terminal shows what is typed, as a shell needs it."""
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def wait(self) -> int:
        return self.process.wait(60)

    def hold(self, key: str) -> int:
        """Presses a key again and again until the command ends. Returns its status; `raw` is then all of its output."""
        while self.process.poll() is None:
            with suppress(OSError):  # the other end is closed
                self.press(key)
            time.sleep(0.001)
        with suppress(OSError):
            while more := os.read(self._ours, 65536):
                self.raw += more.decode(errors="replace")
        return self.process.wait()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def take_terminal() -> None:
    """Makes standard input, a pty, the terminal that sends SIGINT for Ctrl-C. For `preexec_fn`."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
