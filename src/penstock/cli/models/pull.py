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
    """Downloads a model from Hugging Face, or only its files that are new or have changed.

    Prints the model's path. Downloads nothing if `name` is a path, a model of a Python package or the embedded model.
    """
    if _report_local(name):
        return
    started = time.monotonic()
    try:
        path = pull_model(name, revision)
    except KeyboardInterrupt:
        print(f"\npenstock: interrupted: penstock pull {name} continues where it stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    seconds = time.monotonic() - started
    print(f"{name} is on this machine: {format_bytes(model_bytes(path))} in {path}, after {seconds:.1f} s")


def _report_local(name: str) -> bool:
    """Prints where the model is and returns True, if it does not come from Hugging Face; else returns False.

    Raises HubError if the model's Python package is not installed, or if the package's file is damaged.
    """
    if name == EMBEDDED:
        print(f"{name} is part of Penstock: nothing to download")
        return True
    package = next((package for package in PACKAGED if package.name == name), None)
    if package is not None:
        path = package.locate()  # its error has the command that installs the package
        print(f"{name} is installed: {path}")
        return True
    path = Path(name).expanduser()
    if name and path.exists():
        print(f"{name} is a {'folder' if path.is_dir() else 'file'} of this machine: nothing to download")
        return True
    return False
