"""The engine in a process of its own: python -m penstock.engine.process SOCKET

Started by penstock.engine.spawned, which leaves it one end of a pair of sockets, the file descriptor SOCKET, and says
over standard input what to run. Standard input then stays open and empty: its end means that the client's process is
gone.
"""

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.child import STDIN, die_at_end_of_input, die_with_parent
from penstock.engine.life import MODEL, Backend, live
from penstock.engine.socket_port import SocketPort


def serve(backend: Backend) -> int:
    """Run the engine that standard input describes, until it is told to stop or its client is gone; the exit status."""
    gc.disable()  # until it is ready: there is much to import and to load, and none of it is garbage
    logging.basicConfig(format="engine %(levelname)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    faulthandler.enable()
    end = int(sys.argv[1])
    os.set_inheritable(end, False)
    with open(STDIN, "rb", closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        return 1
    die_with_parent()
    die_at_end_of_input()
    port = SocketPort(socket.socket(fileno=end))
    signal.signal(signal.SIGTERM, lambda *_: port.stop("the engine was terminated by SIGTERM"))
    config = msgspec.json.decode(line, type=EngineConfig)
    logging.getLogger().setLevel(config.log_level.upper())
    ended_well = live(config, backend, port, settled=_collect_what_is_new)
    port.close()
    return 0 if ended_well else 1


def _collect_what_is_new() -> None:
    """Collect garbage again, but look no more at the 200,000 objects that are here to stay: that takes a quarter of a
    second, in the middle of somebody's stream."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    sys.exit(serve(MODEL))
