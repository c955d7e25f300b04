"""Checks texts that end up in a header or in a hub's address."""

import re
from typing import Any

MAX_LENGTH = 4096  # characters
_KEY = re.compile(r"[!-~]*")
_REVISION = re.compile(r"\w[\w./+@-]*|", re.ASCII)


def check_key(value: Any) -> Any:
    """Returns an API key as it is. Raises ValueError if an HTTP header cannot carry it; an empty one is not checked."""
    if isinstance(value, str) and (len(value) > MAX_LENGTH or not _KEY.fullmatch(value)):
        raise ValueError(f"give 1 to {MAX_LENGTH} ASCII characters without spaces, as a header carries the key")
    return value


def check_revision(value: Any) -> Any:
    """Returns a revision as it is. Raises ValueError if it cannot be one; an empty one is not checked."""
    if isinstance(value, str) and (len(value) > MAX_LENGTH or ".." in value or not _REVISION.fullmatch(value)):
        raise ValueError("give a branch, tag or commit such as main, without spaces and ..")
    return value


def checked_flag(flag: str, value: str | None) -> str | None:
    """Returns the value of --api-key, --admin-key or --revision. Raises ValueError for one that is empty or
    that its check refuses."""
    if value is None:
        return None
    shown, check = ("(hidden)", check_key) if flag.endswith("-key") else (repr(value), check_revision)
    if not value:
        raise ValueError(f"{flag} is {shown}: it is empty; give a value, or leave it out")
    try:
        check(value)
    except ValueError as error:
        raise ValueError(f"{flag} is {shown}: {error}") from None
    return value
