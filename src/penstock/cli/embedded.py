"""The models that come with Penstock."""

from pathlib import Path

import penstock


def default_model() -> Path:
    """The folder of the embedded model, which commands use if none is named."""
    return Path(penstock.__file__).parent / "assets" / "python-8m"
