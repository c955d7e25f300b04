"""The signals that reach every process of a group at once. Only the client's process handles them."""

import contextlib
import signal
from collections.abc import Iterator

# A terminal's Ctrl-C and its end, and the SIGTERM of systemd, `timeout` or a shell. The client's process decides what
# they mean. Engines and ranks end at its command, or when it has ended.
GROUP_SIGNALS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


@contextlib.contextmanager
def group_signals_blocked() -> Iterator[None]:
    """Let a process started here inherit blocked GROUP_SIGNALS, so that it never sees them, not even while it starts.

    Blocked and not ignored: a blocked signal interrupts no system call of the native threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def block_group_signals() -> None:
    """Block GROUP_SIGNALS in this thread and those that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
