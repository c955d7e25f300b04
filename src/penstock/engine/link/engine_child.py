"""An engine's process before it has a configuration. It needs no event loop.

It imports what it needs while its parent resolves the settings.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.engine.processors import running_on
from penstock.engine.signals import group_signals_blocked
from penstock.environment import child_environment

if TYPE_CHECKING:
    from penstock.config import EngineConfig

STDERR = 2
# -P keeps the working directory, which may be a model's, out of the module search path.
ENGINE = (sys.executable, "-P", "-m", "penstock.engine.process")
REPLACEMENT = (*ENGINE[:-1], "penstock.engine.replacement")  # an engine that no request waits for
IMPORT_RUNTIME = "--import-runtime"
# In a flag or a variable: the engine may have ranks, and then it only schedules.
MAY_MEAN_RANKS = re.compile(r"(--|PENSTOCK_)(config|distributed|tensor|pipeline|expert)", re.IGNORECASE)


class EngineChild:
    """A process that waits for its configuration. It holds the other end of `socket`; no other process can reach it.

    Leaving the context kills it, unless `take_over` was called.
    """

    def __init__(
        self,
        command: Sequence[str] = ENGINE,
        *,
        import_runtime: bool = False,
        processors: Collection[int] | None = None,
    ) -> None:
        """Start the process. Raises OSError when that fails; nothing is left then.

        With `import_runtime`, it imports torch before it has a configuration, which wastes 100 MB if it has ranks. It
        may run on `processors`; None: on those of this thread.
        """
        self.command = tuple(command)  # of an engine that replaces this one, too
        with contextlib.ExitStack() as held:
            self.socket, other = socket.socketpair()
            held.callback(self.socket.close)
            stdin, self._lifeline = os.pipe()
            held.callback(os.close, self._lifeline)
            with (
                other,
                open(stdin, "rb") as pipe,
                group_signals_blocked(),
                running_on(os.sched_getaffinity(0) if processors is None else processors),
            ):
                end = other.fileno()
                early = [IMPORT_RUNTIME] if import_runtime else []
                self.process = subprocess.Popen(
                    [*command, str(end), *early],
                    stdin=pipe,
                    stdout=STDERR,
                    pass_fds=(end,),
                    env=child_environment(os.environ),
                )
            held.callback(self._reap)
            self._held = held.pop_all()

    def send_config(self, config: "EngineConfig") -> None:
        """Send the configuration, with which the process begins to load."""
        import msgspec  # not above, so that the process starts before the import

        with contextlib.suppress(BrokenPipeError):  # it has ended, which `connect` reports
            os.write(self._lifeline, msgspec.json.encode(config) + b"\n")

    def take_over(self) -> contextlib.ExitStack:
        """Return the stack that closes everything held here, the process included. The caller owns it."""
        return self._held.pop_all()

    def __enter__(self) -> "EngineChild":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _reap(self) -> None:
        """Wait for the process, and kill it first if it still runs, because its start was interrupted."""
        self.process.kill()
        self.process.wait()


def one_rank_expected(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether nothing on the command line or in the environment may divide the model among ranks."""
    return not any(map(MAY_MEAN_RANKS.match, (*arguments, *environ)))
