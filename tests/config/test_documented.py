"""docs/configuration.md against the settings and the variables that the code reads."""

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

from penstock.cli.options import ENGINE, SERVER
from penstock.config.settings import Settings
from penstock.config.sources import FILE_VARIABLE, KERNELS, read_settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/configuration.md"


def rows(heading: str) -> dict[str, str]:
    """A section's table: the rest of each row by the names in its first column."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for names, rest in re.findall(r"^\| (`[^|]+`) \| (.*) \|$", section, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{name} is twice in the table {heading!r}"
            found[name] = rest
    return found


def test_every_setting_is_in_the_table() -> None:
    assert set(rows("Every setting")) == {name.replace("_", "-") for name in Settings.model_fields}


def test_every_choice_of_a_setting_is_in_its_row() -> None:
    table = rows("Every setting")
    for name, field in Settings.model_fields.items():
        choices = [
            choice for part in get_args(field.annotation) if get_origin(part) is Literal for choice in get_args(part)
        ]
        missing = [choice for choice in choices if f"`{choice}`" not in table[name.replace("_", "-")]]
        assert not missing, f"{name}: {missing}"


def test_numbers_of_the_table_are_the_defaults_that_help_shows() -> None:
    """`--help` and the table give the same default where it is a number."""
    table = rows("Every setting")
    compared = 0
    for name, annotation in {**SERVER, **ENGINE}.items():
        if name == "config":
            continue
        shown = re.search(r"Default: (\d+(?:\.\d+)?(?:MiB)?)\.(?: |$)", annotation.__metadata__[0].help)
        if shown:
            assert table[name.replace("_", "-")].split(" | ")[0].strip("`") == shown[1], name
            compared += 1
    assert compared > 10


def test_every_variable_that_the_code_reads_is_documented() -> None:
    named = rows("Other variables")
    assert {FILE_VARIABLE, *KERNELS} <= set(named)
    sources = [*(ROOT / "src").rglob("*.py"), ROOT / "hatch_build.py"]
    read = {
        name
        for path in sources
        for name in re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)\"([A-Z_]+)\"", path.read_text())
    }
    assert len(read) >= 4
    assert read <= set(named), f"not in docs/configuration.md: {sorted(read - set(named))}"


def test_the_examples_are_accepted(tmp_path: Path) -> None:
    """The YAML example, and the variables of the systemd unit's file of secrets once their values are filled in."""
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "penstock.yaml"
    path.write_text(example)
    assert set(read_settings(file=path).sources) == {
        "model",
        "max_model_len",
        "kv_cache_memory",
        "enable_prefix_caching",
    }

    lines = (ROOT / "packaging/systemd/penstock.env").read_text().splitlines()
    variables = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", "\n".join(lines), re.MULTILINE))
    assert len(variables) >= 3
    given = read_settings(environ={name: value or "secret" for name, value in variables.items()})
    assert set(given.sources) == {name.removeprefix("PENSTOCK_").lower() for name in variables if "PENSTOCK" in name}
