"""The engine in a process of its own: python -m penstock.engine.process SOCKET [--import-runtime]

Started by penstock.engine.link.engine_child, which passes it one end of a socket pair, the file descriptor SOCKET, and
writes the configuration to standard input. Standard input then stays open and empty: it ends when the client's process
ends. With --import-runtime, the engine imports torch while it has no configuration. Signals to the process group are
blocked from the start (penstock.engine.signals).
"""

import faulthandler
import gc
import os
import socket
import sys
import threading

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.child import STDIN, die_at_end_of_input, die_with_parent, end_now, log_to_stderr
from penstock.engine.executor import import_runtime
from penstock.engine.link.engine_child import IMPORT_RUNTIME
from penstock.engine.link.socket_channel import SocketChannel
from penstock.engine.main import MODEL_BACKEND, EngineBackend, run_engine
from penstock.priority import LOWEST, lower, run_at

IMPORT_NICE = 10  # of the import of torch beside other engines: it gets a tenth of a processor that they use


def serve(backend: EngineBackend) -> int:
    """Run the engine that standard input describes until a Stop or the end of its client. Returns the exit status."""
    gc.disable()  # until it is ready: imports and loading make many objects and no garbage
    configure_log = log_to_stderr("engine")
    faulthandler.enable()
    end = int(sys.argv[1])
    os.set_inheritable(end, False)
    if IMPORT_RUNTIME in sys.argv[2:]:
        threading.Thread(target=import_runtime, name="imports", daemon=True).start()
    with open(STDIN, "rb", closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        os._exit(1)  # not sys.exit, which ends the interpreter below a thread that imports
    die_with_parent()
    die_at_end_of_input()
    channel = SocketChannel(socket.socket(fileno=end))
    config = msgspec.json.decode(line, type=EngineConfig)
    if config.lease is not None and not config.replaces:  # penstock.engine.replacement has imported all
        run_at(IMPORT_NICE, import_runtime)
    configure_log(config.log_format, config.log_level)
    ended_well = run_engine(config, backend, channel, on_loaded=_collect_new_garbage_only)
    channel.close()
    if config.lease is not None:  # to free its memory may take longer than a step of others
        lower(LOWEST)
    return 0 if ended_well else 1


def _collect_new_garbage_only() -> None:
    """Enable garbage collection, but exclude the 200,000 objects that stay for good: to scan them takes 0.25 s, and
    delays every stream."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    end_now(serve(MODEL_BACKEND))
