"""Becomes a command that ends as soon as its parent does, also where that is killed: bound.py PARENT COMMAND..."""

import os
import sys
from collections.abc import Sequence

from penstock.engine.child import die_with_parent


def bound(command: Sequence[str]) -> list[str]:
    """The same command, for a child of the thread that starts it."""
    return [sys.executable, __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() == int(sys.argv[1]):  # else it has ended already
        os.execvp(sys.argv[2], sys.argv[2:])
