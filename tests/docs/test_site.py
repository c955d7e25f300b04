"""The site of mkdocs.yml has every page, and the pages for users of other servers name settings that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config import read_settings
from penstock.config.settings import Settings
from tests.docs.pages import ROOT

MIGRATING = sorted((ROOT / "docs" / "migrating").glob("*.md"))
PLACEHOLDERS = ("http", "cert.pem", "key.pem")  # of values, which are read later


def navigation() -> list[str]:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    pending: list[Any] = [yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]]
    found = []
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            found.append(entry)
        else:
            pending += entry.values() if isinstance(entry, dict) else entry
    return found


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    outside = {"index.md", "benchmarks.md", "changelog.md", "contributing.md"}  # see scripts/docs_site.py
    assert sorted(navigation()) == sorted(pages | outside)


def flags(page: Path) -> list[tuple[int, str, str]]:
    """(line, flag, value or "") of each flag in the columns of Penstock; where these say so, of the other server's."""
    found = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 3:
            continue
        column = cells[0] if cells[1] == "the same" else cells[1]
        last = ""
        for code in re.findall(r"`([^`]+)`", column):
            name, _, value = code.partition(" ")
            if name.startswith("--"):
                last = name
                found.append((number, name, value))
            elif last and cells[1] != "the same":  # another value of the flag before it
                found.append((number, last, code))
    return found


@pytest.mark.parametrize("page", MIGRATING, ids=lambda page: page.stem)
def test_settings_of_a_page_for_users_of_another_server_exist(page: Path) -> None:
    every = flags(page)
    assert len(every) > 8
    for number, flag, value in every:
        name = flag.removeprefix("--").replace("-", "_").removeprefix("no_")
        assert name in Settings.model_fields, f"{page.name}:{number}: {flag}"
        if value and not value.startswith(PLACEHOLDERS):
            read_settings({name: value}, {}, None)  # raises an error that names the value


def test_a_wrong_value_would_be_found() -> None:
    with pytest.raises(ValueError, match="int5"):
        read_settings({"quantization": "int5"}, {}, None)
