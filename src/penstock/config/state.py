"""The user's folders for files that remain after a command has ended."""

import os
from collections.abc import Mapping
from pathlib import Path


def state_home(environ: Mapping[str, str]) -> Path:
    """Returns the user's folder for state, as in the XDG base directories. It may be one that cannot be written."""
    state = environ.get("XDG_STATE_HOME", "")
    return Path(state) if os.path.isabs(state) else _home() / ".local" / "state"


def cache_home(environ: Mapping[str, str]) -> Path:
    """Returns the user's folder for what can be computed again, as in the XDG base directories."""
    cache = environ.get("XDG_CACHE_HOME", "")
    return Path(cache) if os.path.isabs(cache) else _home() / ".cache"


def _home() -> Path:
    """The user's home. A user without one, such as a container's number that is not in /etc/passwd, has the one of
    Debian's system users."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")
