"""Finds the models that are part of Penstock."""

from pathlib import Path

import penstock


def default_model() -> Path:
    """Returns the folder of the embedded model, which commands use if the user names none."""
    return Path(penstock.__file__).parent / "assets" / "python-8m"
