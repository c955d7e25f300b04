"""Tables on the terminal, and results in files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.prepare.files import unwritable

TEXTS = ("case", "op", "shape", "type", "engine")  # columns that hold text; the others hold numbers
LONG_TEXTS = ("weights",)  # columns whose text may take several lines
SHARES = ("roofline_fraction", "share")


def write_file(flag: str, path: str | None, text: str) -> None:
    """Writes `text` to `path`; does nothing if `path` is None. Raises ValueError if the write fails."""
    if path is None:
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise unwritable(flag, path, str(error.strerror).lower()) from None


def write_json(path: str | None, figures: Any) -> None:
    """Writes the figures to the file that --json names."""
    write_file("--json", path, json.dumps(figures, indent=2) + "\n")


def show_table(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows as a table. A column is its heading and the key of its values in a row."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading, _ in columns:
        is_text = heading in TEXTS or heading in LONG_TEXTS
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading in TEXTS)
    for row in rows:
        table.add_row(*(cell(key, row.get(key)) for _, key in columns))
    Console().print(table)


def cell(key: str, value: Any) -> str:
    """Returns a figure as text: '–' for none, '12.3%' for a share, '1,234' for a number."""
    if value is None:
        return "–"
    if key in SHARES:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def duration(seconds: float) -> str:
    """Returns a duration as text, such as '20.7 ms', '6.43 µs' or '0'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"
