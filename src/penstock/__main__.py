"""The console entry: `penstock`, `python -m penstock`."""

import os
import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Ctrl-C ends it quietly from its first moment on: while it imports, it holds nothing that must be let go."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from penstock.cli.main import main as command

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
