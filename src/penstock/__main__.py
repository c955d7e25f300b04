"""The console entry: `penstock`, `python -m penstock`."""

import os
import signal
import sys
from contextlib import ExitStack, suppress

from penstock.environment import QUIET

INTERRUPTED = 130
TERMINATED = 143


def main() -> None:
    """Runs the command line. Ctrl-C and SIGTERM end it without a traceback, also during the imports.

    There is nothing to clean up then: the engine process ends with the process that started it.
    """
    _open_standard_streams()
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    signal.signal(signal.SIGTERM, _terminated)
    if sys.argv[1:2] == ["serve"]:
        os.environ.update(QUIET)
    with ExitStack() as held:
        engine = None
        # The engine takes longest to start, so it starts before the command line is read.
        if sys.argv[1:2] in (["serve"], ["run"], ["engine"]) and not _starts_none(sys.argv):
            from penstock.engine.link.engine_child import EngineChild, one_rank_expected

            with suppress(OSError):  # the command will try again, and say why it cannot
                engine = held.enter_context(EngineChild(import_runtime=one_rank_expected(sys.argv, os.environ)))
        from penstock.cli.main import main as command

        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            command(engine)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


def _starts_none(arguments: list[str]) -> bool:
    """Returns whether a command starts no engine process of its own, or several on parts of the machine. A server of a
    repository or of providers has one if a model is named first; elsewhere it is found when the command line is read.
    """
    flags = {argument.partition("=")[0] for argument in arguments}
    if not flags.isdisjoint(("--help", "--engines", "--replicas")):
        return True
    return not flags.isdisjoint(("--repository", "--providers")) and arguments[2].startswith("-")


def _open_standard_streams() -> None:
    """Opens /dev/null for standard input, output and error where the caller has closed them, as some service managers
    do. Else a socket or the storage would get the descriptor, and with it what is meant for the log."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or os.fdopen(0, "r", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _terminated(*_: object) -> None:
    """Ends by the signal, as if it were not handled. The kernel sends no unhandled signal to a container's first
    process, so that one would be killed only after a timeout."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(TERMINATED)


if __name__ == "__main__":
    main()
