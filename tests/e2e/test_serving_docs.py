"""docs/serving.md, compared with a running server and the command line."""

import re
from pathlib import Path

from typer.main import get_command

from penstock.cli.main import app
from penstock.frontend import RequestLimits
from tests.e2e.server import Server

DOC = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def test_every_flag_and_variable_in_the_docs_exists() -> None:
    root = get_command(app)
    commands = [root, *root.commands.values(), *root.commands["bench"].commands.values()]  # type: ignore[attr-defined]
    flags = {name for command in commands for option in command.params for name in option.opts + option.secondary_opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", DOC))
    assert named - flags <= {"--help"} and len(named) > 30
    variables = set(re.findall(r"\bPENSTOCK_\w+", DOC))
    assert {"--" + name.removeprefix("PENSTOCK_").lower().replace("_", "-") for name in variables} <= flags


def test_limits_and_paths_in_the_docs_are_the_servers(server: Server) -> None:
    assert f"headers of more than {RequestLimits().max_header_bytes >> 10} KiB" in DOC
    paths = set(re.findall(r"`(/[a-z0-9/]+)`", DOC))
    assert len(paths) > 10
    assert {path for path in paths if server.get(path).status_code == 404} == set()
