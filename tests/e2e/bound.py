"""Becomes a command that ends as soon as its parent does, also where that is killed: bound.py PARENT COMMAND...

It imports nothing of Penstock and no site-packages: most servers of tests start through it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def bound(command: Sequence[str]) -> list[str]:
    """The same command, for a child of the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == int(sys.argv[1]):  # else it has ended already
        os.execvp(sys.argv[2], sys.argv[2:])
