"""The engine in a process of its own: python -m penstock.engine.process ENDPOINT

Started by penstock.engine.ipc, which says over standard input what to run once this process has connected. Standard
input then stays open and empty: its end means that the client's process is gone.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import stat
import sys
import threading
from pathlib import Path

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.life import MODEL, Backend, live
from penstock.engine.socket_port import SocketPort
from penstock.engine.wire import Hello

STDIN = 0
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def serve(backend: Backend) -> int:
    """Run the engine that standard input describes, until it is told to stop or its client is gone; the exit status."""
    logging.basicConfig(format="engine %(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches us too; the client decides what it means
    endpoint = sys.argv[1]
    port = SocketPort(endpoint)
    port.announce(Hello())
    with open(STDIN, "rb", closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        remove_socket(endpoint)
        return 1
    die_with_client()
    signal.signal(signal.SIGTERM, lambda *_: port.stop("the engine was terminated by SIGTERM"))
    config = msgspec.json.decode(line, type=EngineConfig)
    logging.getLogger().setLevel(config.log_level.upper())
    ended_well = live(config, backend, port)
    port.close()
    return 0 if ended_well else 1


def remove_socket(endpoint: str) -> None:
    """What the client, had it lived, would have removed once we were connected."""
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
            path.parent.rmdir()
    except OSError as error:
        log.warning("could not remove %s: %s", path, error)


def die_with_client() -> None:
    """End this process when its client's does, also in the middle of a step.

    The kernel's parent-death signal is the surest way where there is one. The end of standard input works anywhere, for
    as long as Python can switch threads, and also where the process that started us was not the last to hold the pipe.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        log.debug("no prctl here")
    threading.Thread(target=_exit_at_end_of_input, name="client-watch", daemon=True).start()


def _exit_at_end_of_input() -> None:
    while os.read(STDIN, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(serve(MODEL))
