"""Reads the training text: CPython's standard library without tests, generated tables and held-out modules."""

import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

# Never trained on and never shown to the tokenizer, in any version.
HELD_OUT = (
    "bisect",
    "calendar",
    "colorsys",
    "fractions",
    "graphlib",
    "heapq",
    "netrc",
    "sched",
    "shlex",
    "statistics",
    "textwrap",
    "timeit",
)

_EXCLUDED_DIRS = {"site-packages", "pydoc_data", "ensurepip", "test", "tests", "idle_test"}
_CODEC_TABLE = re.compile(r"encodings/(cp\d|mac_|iso8859|koi8|kz1048|ptcp154|tis_620|hp_roman8|palmos|aliases)")
_LONGEST_LINE = 400  # characters; longer lines are data
_TABLE_SHARE = 0.15  # share of characters in numbers or escapes; a file above it is a table
_NUMBER_OR_ESCAPE = re.compile(r"\\[xuU][0-9a-fA-F]+|\b0[xX][0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Document:
    """One source file: its path below the standard library and its text."""

    path: str
    text: str


def _is_held_out(relative: Path) -> bool:
    return relative.parts[0].removesuffix(".py") in HELD_OUT


def _is_ordinary_code(path: str, text: str) -> bool:
    if _CODEC_TABLE.search(path) or max(map(len, text.splitlines()), default=0) > _LONGEST_LINE:
        return False
    if sum(len(m.group()) for m in _NUMBER_OR_ESCAPE.finditer(text)) > _TABLE_SHARE * len(text):
        return False
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return bool(text.strip())


def read_corpus(stdlib_dirs: list[Path]) -> list[Document]:
    """Return the training documents of the given standard library folders, sorted by path.

    A path that an earlier folder has is not taken again from a later one, so that a second, older version adds only the
    modules that were removed since. Files with equal text are taken once.
    """
    taken: dict[str, Document] = {}
    digests: set[bytes] = set()
    for root in stdlib_dirs:
        for file in sorted(root.rglob("*.py")):
            relative = file.relative_to(root)
            path = relative.as_posix()
            parts = set(relative.parts)
            if path in taken or parts & _EXCLUDED_DIRS or relative.parts[0].startswith(("config-", "_sysconfigdata")):
                continue
            if _is_held_out(relative):
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if digest in digests or not _is_ordinary_code(path, text):
                continue
            digests.add(digest)
            taken[path] = Document(path, text)
    return [taken[path] for path in sorted(taken)]


def held_out_sources(stdlib: Path) -> dict[str, str]:
    """Return the held-out modules' sources by module name."""
    return {name: (stdlib / f"{name}.py").read_text(encoding="utf-8") for name in HELD_OUT}
