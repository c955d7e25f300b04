"""A process that does what may take too long, and can be killed: `python -m penstock.text.worker`."""

import contextlib
import select
import subprocess
import sys
import time

START_SECONDS = 30.0  # for the process to start, on a busy machine


class WorkerProcess:
    """Answers lines with lines. One thread at a time calls."""

    def __init__(self, setup: bytes) -> None:
        """Returns when the process is ready. Raises RuntimeError if it does not start; the log has its error."""
        command = [sys.executable, "-m", "penstock.text.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if not self.ask(setup, START_SECONDS):
            raise RuntimeError("the process for work on texts did not start; the log has its error")

    @property
    def runs(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def ask(self, line: bytes, seconds: float) -> bytes:
        """The answer to a line. Empty if the process ended, or had no answer in time; it is killed then."""
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            if answer := self._read(seconds):
                return answer
        except (BrokenPipeError, TimeoutError):
            pass
        self.kill()
        return b""

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # of what was not read
            self._process.communicate()

    def _read(self, seconds: float) -> bytes:
        """A line of the process; empty if it has ended. TimeoutError if none comes in time."""
        assert self._process.stdout is not None
        end, parts = time.monotonic() + seconds, list[bytes]()
        while not parts or not parts[-1].endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise TimeoutError
            part = self._process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not part:
                return b""
            parts.append(part)
        return b"".join(parts)
