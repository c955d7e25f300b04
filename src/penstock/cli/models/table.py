"""Prints tables that other programs can read: one line a row, and never cut."""

import shutil
import sys
from collections.abc import Mapping, Sequence

# Columns that hold text. The others hold numbers.
_TEXTS = frozenset(
    (
        *("MODELS", "ARCHITECTURE", "RANKS", "QUANTISED", "GIVES", "GGUF"),  # of penstock models
        *("NAME", "REVISION", "FORMAT", "MODIFIED", "WHERE"),  # of penstock list
        *("TYPE", "IN A CPU'S MEMORY"),  # of penstock show
        "CHOICE",  # of penstock route evaluate
    )
)


def printable(text: str) -> str:
    """Returns a text of a file without characters that change a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints columns as wide as their texts, and none that is empty. Lines are never cut, so that grep finds names. A
    terminal that is too narrow shows the first columns alone, and a line says which are missing."""
    filled = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    width = {name: max(len(name), *(len(row[name]) for row in rows)) for name in filled}
    columns = _fitting(width, shutil.get_terminal_size().columns) if sys.stdout.isatty() else filled
    for row in ({name: name for name in columns}, *rows):
        cells = (row[name].ljust(width[name]) if name in _TEXTS else row[name].rjust(width[name]) for name in columns)
        print("  ".join(cells).rstrip())
    if missing := [name for name in filled if name not in columns]:
        print(f"\nA wider terminal also shows: {', '.join(missing)}")


def _fitting(width: Mapping[str, int], room: int) -> list[str]:
    """Returns the first columns whose lines are not longer than `room`, at least one."""
    used = 0
    columns: list[str] = []
    for name, chars in width.items():
        used += chars + (2 if columns else 0)
        if used > room and columns:
            break
        columns.append(name)
    return columns


def count_text(count: int) -> str:
    """Returns a number of parameters as text, such as '8.4 M' or '1.24 B'."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return str(count)
