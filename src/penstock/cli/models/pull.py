"""Implements `penstock pull`."""

import sys
import time
from pathlib import Path

from penstock.config import format_bytes
from penstock.weights.files import model_bytes
from penstock.weights.hub import pull_model
from penstock.weights.packaged import EMBEDDED, PACKAGED

INTERRUPTED = 130  # exit status


def pull(name: str, revision: str | None) -> None:
    """Downloads a model from the hub, or what is new in it."""
    if _is_here(name):
        return
    started = time.monotonic()
    try:
        path = pull_model(name, revision)
    except KeyboardInterrupt:
        print(f"\npenstock: interrupted: penstock pull {name} continues where it stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    seconds = time.monotonic() - started
    print(f"{name} is on this machine: {format_bytes(model_bytes(path))} in {path}, after {seconds:.1f} s")


def _is_here(name: str) -> bool:
    """Whether the model is on this machine and not the hub's, which is then printed. Raises ValueError for a Python
    package that is not installed."""
    if name == EMBEDDED:
        print(f"{name} is part of Penstock: nothing to download")
        return True
    package = next((package for package in PACKAGED if package.name == name), None)
    if package is not None:
        path = package.locate()  # says how to install it
        print(f"{name} is installed: {path}")
        return True
    path = Path(name).expanduser()
    if name and path.exists():
        print(f"{name} is a {'folder' if path.is_dir() else 'file'} of this machine: nothing to download")
        return True
    return False
