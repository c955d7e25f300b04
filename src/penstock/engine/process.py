"""The engine in a process of its own: python -m penstock.engine.process ENDPOINT

Started by penstock.engine.ipc, which says over standard input what to run once this process has connected. Standard
input then stays open and empty: its end means that the client's process is gone.
"""

import faulthandler
import logging
import signal
import sys

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.child import STDIN, die_at_end_of_input, die_with_parent, remove_socket
from penstock.engine.life import MODEL, Backend, live
from penstock.engine.socket_port import SocketPort
from penstock.engine.wire import Hello


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
    die_with_parent()
    die_at_end_of_input()
    signal.signal(signal.SIGTERM, lambda *_: port.stop("the engine was terminated by SIGTERM"))
    config = msgspec.json.decode(line, type=EngineConfig)
    logging.getLogger().setLevel(config.log_level.upper())
    ended_well = live(config, backend, port)
    port.close()
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(serve(MODEL))
