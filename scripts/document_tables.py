"""Writes the tables of `penstock.declared` into the documentation: python scripts/document_tables.py"""

from collections.abc import Sequence
from pathlib import Path

from penstock.declared.sampling import SAMPLING
from penstock.declared.settings import SETTINGS

DOCS = Path(__file__).parents[1] / "docs"


def with_rows(text: str, heading: str, rows: Sequence[str]) -> str:
    """Returns a page's text with these rows in the table below a heading."""
    before, found, section = text.partition(f"\n## {heading}\n")
    if not found:
        raise ValueError(f"there is no heading {heading!r}")
    body, rule, rest = section.partition("|---|---|---|\n")
    lines = rest.split("\n")
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return "".join((before, found, body, rule, "\n".join([*rows, *lines[end:]])))


def pages() -> dict[Path, str]:
    """Returns the text that each page should have."""
    settings, sampling = DOCS / "configuration.md", DOCS / "openai.md"
    return {
        settings: with_rows(settings.read_text(), "Every setting", [each.row for each in SETTINGS.values()]),
        sampling: with_rows(sampling.read_text(), "Sampling", [each.row(name) for name, each in SAMPLING.items()]),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
