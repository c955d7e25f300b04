"""The user's folder for state: files that remain after a command has ended."""

import os
from collections.abc import Mapping
from pathlib import Path


def state_home(environ: Mapping[str, str]) -> Path:
    """Returns the user's folder for state, as in the XDG base directories."""
    state = environ.get("XDG_STATE_HOME", "")
    return Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
