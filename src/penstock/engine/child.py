"""Child processes, both sides: the socket's place, the end with the parent, the text about an end."""

import ctypes
import logging
import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from penstock.observe.logs import LogFormat, formatter
from penstock.observe.stderr import StderrHandler

STDIN, STDERR = 0, 2
SOCKET_NAME = "socket"
IPC_PATH_MAX_LEN = 107  # zmq.IPC_PATH_MAX_LEN; zmq itself is not imported, so that a child starts early
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


# -- the parent's side ------------------------------------------------------------------------------------------------


def private_directory() -> Path:
    """A new directory of mode 0700, with a path short enough for a socket in it."""
    parent = tempfile.gettempdir()
    longest = IPC_PATH_MAX_LEN - len(f"/penstock-12345678/{SOCKET_NAME}")
    return Path(tempfile.mkdtemp(prefix="penstock-", dir=parent if len(parent) <= longest else "/tmp"))


def how_it_ended(status: int, *, killed_here: bool = False) -> str:
    """Return the rest of a sentence that begins with the name of a process that has ended. `killed_here`: this process
    killed it, so the kernel did not, which would mean that memory is short."""
    if status >= 0:
        return f"ended with status {status}; its messages on standard error say why"
    hint = ": the machine may be out of memory" if -status == signal.SIGKILL and not killed_here else ""
    return f"was killed by {signal.Signals(-status).name}{hint}"


# -- the child's side -------------------------------------------------------------------------------------------------


def log_to_stderr(name: str) -> Callable[[LogFormat, str], None]:
    """Log to standard error without blocking, as the client's process does, with this process's name.

    Returns a function that sets the format and the level, once the configuration is there.
    """
    handler = StderrHandler()
    handler.setFormatter(formatter("text", name))
    logging.basicConfig(level=logging.INFO, handlers=[handler])

    def configure(style: LogFormat, level: str) -> None:
        handler.setFormatter(formatter(style, name))
        logging.getLogger().setLevel(level.upper())

    return configure


def remove_socket(endpoint: str) -> None:
    """Remove the socket's file and directory, which the parent has not done because it died too early."""
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
            path.parent.rmdir()
    except FileNotFoundError:
        pass  # another child of the same parent has removed it
    except OSError as error:
        log.warning("could not remove %s: %s", path, error)


def end_now(status: int) -> NoReturn:
    """End this process at once. The interpreter's own end would free every object first, which takes a quarter of a
    second after an import of torch."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, also during a step."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        log.debug("no prctl here")


def die_at_end_of_input(last_act: Callable[[], None] = lambda: None) -> None:
    """End this process when the other end of its standard input is closed everywhere; `last_act` is called before.

    Works on every system while Python can switch threads, also when other processes than the parent hold the pipe.
    """

    def watch() -> None:
        while os.read(STDIN, 4096):
            pass
        last_act()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
