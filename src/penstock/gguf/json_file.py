"""Reads the JSON files in a model's folder. They are untrusted: size, depth and keys are checked.

The syntax is that of Python's `json`, with which these files are written and read: `NaN` and `Infinity` are numbers.
"""

import json
from pathlib import Path
from typing import Any

from penstock.gguf.other_files import describe_other

MAX_BYTES = 64 << 20  # the largest known index (a mixture of experts with 100,000 tensors) has 10 MB
MAX_DEPTH = 32
_KINDS = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def read_json_object(path: Path, *, max_bytes: int = MAX_BYTES, unique: bool = True) -> dict[str, Any]:
    """The JSON object in a file. Without `unique`, the last of equal keys counts.

    ValueError names the file and what is wrong with it; OSError as open() gives it.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path}: {size} bytes of JSON, more than the {max_bytes} allowed")
    try:
        return parse_json_object(path.read_bytes(), str(path), unique=unique)
    except ValueError as error:
        if other := describe_other(path):
            raise ValueError(f"{path} is {other}") from None
        raise error from None


def parse_json_object(data: bytes, what: str, *, unique: bool = True) -> dict[str, Any]:
    """The JSON object in `data`, at most 32 deep and, if `unique`, with no key twice. ValueError begins with `what`."""
    try:
        value = json.loads(data, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError(f"{what}: JSON nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # of the decoder, of UTF-8 or of _unique
        raise ValueError(f"{what} is not valid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} holds a JSON {_KINDS[type(value)]}; a JSON object is expected")
    _check_depth(value, what)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice")
    return result


def _check_depth(value: Any, what: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"{what}: JSON nested deeper than {MAX_DEPTH}")
