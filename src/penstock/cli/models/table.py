"""Prints tables that other programs can read: one line a row, and never cut."""

from collections.abc import Mapping, Sequence


def printable(text: str) -> str:
    """Returns a text of a file without characters that change a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints columns as wide as their texts, and none that is empty. Lines are never cut, so that grep finds names."""
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    width = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    texts = (
        "MODELS",
        "ARCHITECTURE",
        "GGUF",
        "NAME",
        "REVISION",
        "FORMAT",
        "MODIFIED",
        "WHERE",
        "TYPE",
        "IN A CPU'S MEMORY",
    )
    for row in ({name: name for name in columns}, *rows):
        cells = (row[name].ljust(width[name]) if name in texts else row[name].rjust(width[name]) for name in columns)
        print("  ".join(cells).rstrip())


def count_text(count: int) -> str:
    """Returns a number of parameters as text, such as '8.4 M' or '1.24 B'."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return str(count)
