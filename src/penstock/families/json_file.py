"""Reads JSON from a model's folder. It is untrusted: its size, its depth and its keys are checked."""

import json
from pathlib import Path
from typing import Any

from penstock.gguf import describe_other

MAX_BYTES = 64 << 20  # the largest known index (a mixture of experts with 100,000 tensors) has 10 MB
MAX_DEPTH = 32


def read_json_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file. ValueError names the file and what is wrong with it; OSError as open() gives it."""
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path}: {size} bytes of JSON, more than the {max_bytes} allowed")
    try:
        return parse_json_object(path.read_bytes(), str(path))
    except ValueError as error:
        if other := describe_other(path):
            raise ValueError(f"{path} is {other}") from None
        raise error from None


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`, at most 32 deep and with no key twice. ValueError begins with `what`."""
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"{what}: JSON nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:  # of the decoder, of UTF-8 or of _unique
        raise ValueError(f"{what}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what}: a JSON object is expected, not {type(value).__name__}")
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
