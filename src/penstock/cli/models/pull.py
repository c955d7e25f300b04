"""Implements `penstock pull`."""

import sys
import time
from pathlib import Path

from penstock.config import format_bytes
from penstock.weights.files import model_bytes
from penstock.weights.gguf_choice import HubError
from penstock.weights.hub import pull_model
from penstock.weights.packaged import EMBEDDED, PACKAGED

INTERRUPTED = 130  # exit status


def pull(name: str, revision: str | None) -> None:
    """Downloads a model from Hugging Face, or only its files that are new or have changed.

    Prints the model's path. Downloads nothing if `name` is a path, a model of a Python package or the embedded model.
    Raises HubError if these are to have a revision.
    """
    there = _find_local(name)
    if there is not None:
        if revision is not None:
            raise HubError(f"{there}, so it has no revisions; leave --revision {revision} out")
        print(f"{there}: nothing to download")
        return
    started = time.monotonic()
    try:
        path = pull_model(name, revision)
    except KeyboardInterrupt:
        print(f"\npenstock: interrupted: penstock pull {name} continues where it stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    seconds = time.monotonic() - started
    print(f"{name} is on this machine: {format_bytes(model_bytes(path))} in {path}, after {seconds:.1f} s")


def _find_local(name: str) -> str | None:
    """Says where the model is, if it does not come from Hugging Face.

    Raises HubError if the model's Python package is not installed, or if the package's file is damaged.
    """
    if name == EMBEDDED:
        return f"{name} is part of Penstock"
    package = next((package for package in PACKAGED if package.name == name), None)
    if package is not None:
        return f"{name} is installed in {package.locate()}"  # its error has the command that installs the package
    path = Path(name).expanduser()
    if name and path.exists():
        return f"{name} is a {'folder' if path.is_dir() else 'file'} of this machine"
    return None
