"""Recognises by its first bytes a file that is no model, so that the error can say what it is and what to do."""

import re
from pathlib import Path

READ_BYTES = 512

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype html|html|head|\?xml)", re.IGNORECASE | re.DOTALL)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")


def describe_other(path: Path) -> str:
    """Returns what a file is and what to do: "a git-lfs pointer ...; run git lfs pull". Returns "" if it is of no kind
    that is known, or cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(READ_BYTES)
    except OSError:
        return ""
    if not start:
        return "empty; download it again"
    if start.startswith(_POINTER):
        return "a git-lfs pointer, not the file itself; run git lfs pull in its folder, or download it from the hub"
    if _PAGE.match(start):
        return "a web page, perhaps of a login or an error; download the file itself, with a token if it is gated"
    if start.startswith(b"GGUF"):
        return "a GGUF file; rename it so that its name ends in .gguf"
    if start.startswith(b"PK\x03\x04") or _PICKLE.match(start):
        return "a pickle or a zip archive, which is not read, as a pickle can run code; use safetensors or GGUF"
    if start.startswith(b"\x1f\x8b") or start[257:262] == b"ustar":
        return "an archive; unpack it and name the folder"
    return ""


def not_a_model(path: Path) -> str:
    """Returns the error for a file that was named as a model and is not in GGUF."""
    if path.suffix == ".safetensors":
        return f"{path} is a file of weights; name its folder, {path.parent}, which has config.json too"
    other = describe_other(path)
    return f"{path} is {other or 'a file; name a GGUF file, or the folder of config.json and safetensors'}"
