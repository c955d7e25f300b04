"""Implements `penstock pull`."""

import sys
import time

from penstock.config import format_bytes
from penstock.weights.files import model_bytes
from penstock.weights.hub import local_path, pull_model

INTERRUPTED = 130  # exit status


def pull(name: str, revision: str | None) -> None:
    """Downloads a model from Hugging Face, or only its files that are new or have changed.

    Prints the model's path. Downloads nothing if `name` is a path, a model of a Python package or the embedded model.
    Raises HubError, as `pull_model` and `local_path` do.
    """
    if (there := local_path(name, revision)) is not None:
        print(f"{name} is on this machine, in {there}: nothing to download")
        return
    started = time.monotonic()
    try:
        path = pull_model(name, revision)
    except KeyboardInterrupt:
        print(f"\npenstock: interrupted: penstock pull {name} continues where it stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    seconds = time.monotonic() - started
    print(f"{name} is on this machine: {format_bytes(model_bytes(path))} in {path}, after {seconds:.1f} s")
