"""Reads the arguments of a call that a model wrote, also if they are cut off or not quite JSON."""

import json
import re
from typing import Any

from pydantic_core import from_json

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_object(text: str) -> dict[str, Any]:
    """Returns the object in a text, or what can be read of it: the first of several, and the part before a cut."""
    value: Any = _read(text.strip())
    if isinstance(value, str):  # an object that was encoded twice
        value = _read(value.strip())
    if not isinstance(value, dict):
        return {}
    return _without_surrogates(value) if _SURROGATE.search(text) else value


def _read(text: str) -> Any:
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)[0]
    except (ValueError, RecursionError):
        pass
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None


def _without_surrogates(value: Any) -> Any:
    """The value with a replacement character for each half of a surrogate pair, which cannot be encoded."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
        case list():
            return [_without_surrogates(item) for item in value]
    return value
