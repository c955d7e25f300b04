"""Writes tables into the documentation, those of settings, parameters and models: python scripts/document_tables.py"""

import re
from collections.abc import Sequence
from pathlib import Path

from penstock.declared.sampling import SAMPLING
from penstock.declared.settings import SETTINGS
from penstock.families.supported import SupportedModel, supported_models

DOCS = Path(__file__).parents[1] / "docs"
ROWS = re.compile(r"^\|(?:---\|)+\n((?:\|.*\n)*)", re.MULTILINE)


def with_rows(text: str, heading: str, rows: Sequence[str]) -> str:
    """Returns a page's text with these rows in the first table below a heading."""
    start = text.find(f"{heading}\n")
    table = ROWS.search(text, start)
    if start < 0 or table is None:
        raise ValueError(f"there is no table below a heading {heading!r}")
    return text[: table.start(1)] + "".join(f"{row}\n" for row in rows) + text[table.end(1) :]


def model_row(model: SupportedModel) -> str:
    quantised = [*model.quantization, *(["KV"] if model.quantized_kv else [])]
    lists = [", ".join(names) or "-" for names in (model.gguf, model.ranks, quantised)]
    flags = ["yes" if flag else "no" for flag in (model.prefix_cache, model.speculation, model.gpu)]
    return f"| {' | '.join((model.models, f'`{model.architecture}`', model.gives, *lists, *flags))} |"


def pages() -> dict[Path, str]:
    """Returns the text that each page should have."""
    tables = (
        ("configuration.md", "## Every setting", [each.row for each in SETTINGS.values()]),
        ("openai.md", "## Sampling", [each.row(name) for name, each in SAMPLING.items()]),
        ("supported-models.md", "# Supported models", [model_row(each) for each in supported_models()]),
    )
    return {DOCS / name: with_rows((DOCS / name).read_text(), heading, rows) for name, heading, rows in tables}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
