"""An engine's process from its start on: the part that needs neither an event loop nor a configuration.

Who starts it first and looks into its own settings afterwards has both done at once.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config import EngineConfig

STDERR = 2
# -P keeps the working directory, which may be a model's, out of the module search path.
ENGINE = (sys.executable, "-P", "-m", "penstock.engine.process")
# NumPy's threads for products, which no engine makes by it, would spin beside the imports.
QUIET = {"OPENBLAS_NUM_THREADS": "1"}


class EngineChild:
    """A process that waits to be told what to run. It holds the other end of `socket`, which nobody else can reach.

    Leaving the context ends it, unless somebody has taken it over.
    """

    def __init__(self, command: Sequence[str] = ENGINE) -> None:
        """Starts it. OSError where that fails; nothing is left then."""
        with contextlib.ExitStack() as held:
            self.socket, other = socket.socketpair()
            held.callback(self.socket.close)
            stdin, self._lifeline = os.pipe()
            held.callback(os.close, self._lifeline)
            with other, open(stdin, "rb") as pipe, _deaf_to_interrupts():
                end = other.fileno()
                self.process = subprocess.Popen(
                    [*command, str(end)], stdin=pipe, stdout=STDERR, pass_fds=(end,), env={**os.environ, **QUIET}
                )
            held.callback(self._reap)
            self._held = held.pop_all()

    def send_config(self, config: "EngineConfig") -> None:
        """What it shall run: it loads from then on."""
        import msgspec  # here and not above, as all else that a process can be started without

        with contextlib.suppress(BrokenPipeError):  # whoever takes it over will notice that it has ended
            os.write(self._lifeline, msgspec.json.encode(config) + b"\n")

    def take_over(self) -> contextlib.ExitStack:
        """What closes all that is held here, the process included, is the caller's from now on."""
        return self._held.pop_all()

    def __enter__(self) -> "EngineChild":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()

    def _reap(self) -> None:
        """Kills only where starting up was interrupted: else the process is known to have ended."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A process started here is never interrupted, not even while it imports: a terminal's Ctrl-C reaches it too, and
    the client decides what it means."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
