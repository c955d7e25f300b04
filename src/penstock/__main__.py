"""The console entry: `penstock`, `python -m penstock`."""

import os
import signal

INTERRUPTED = 130


def main() -> None:
    """Ctrl-C ends it quietly from its first moment on: while it imports, it holds nothing that must be let go."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from penstock.cli.main import main as command

    signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
