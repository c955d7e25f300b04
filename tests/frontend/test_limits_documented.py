"""docs/limits.md has every limit with its default."""

import re
from pathlib import Path

from penstock.config import ServerConfig
from penstock.frontend import RequestLimits

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
ROW = re.compile(r"^\| [^|]*\(`(?P<name>\w+)`\)[^|]*\| (?P<default>[\d.]+)", re.MULTILINE)


def test_every_limit_is_there_with_its_default() -> None:
    limits = RequestLimits()
    documented = {row["name"]: float(row["default"]) for row in ROW.finditer(PAGE.read_text())}
    names = (name for name in RequestLimits.__struct_fields__ if name != "retry_after")
    values = {name: getattr(limits, name) for name in names}
    fields = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    assert documented == fields


def test_settings_and_limits_have_the_same_defaults() -> None:
    assert RequestLimits.of(ServerConfig()) == RequestLimits()
