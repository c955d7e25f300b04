"""The user's folders for files that remain after a command has ended."""

import os
from collections.abc import Mapping
from pathlib import Path


def state_home(environ: Mapping[str, str]) -> Path:
    """Returns the user's folder for state, as in the XDG base directories."""
    state = environ.get("XDG_STATE_HOME", "")
    return Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"


def cache_home(environ: Mapping[str, str]) -> Path:
    """Returns the user's folder for what can be computed again, as in the XDG base directories."""
    cache = environ.get("XDG_CACHE_HOME", "")
    return Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
