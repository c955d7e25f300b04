"""docs/serving.md, compared with a running server and the command line."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from penstock.cli.main import app
from penstock.frontend import RequestLimits
from tests.e2e.server import Server

DOC = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
SUFFIXES = {"counter": "_total", "gauge": "", "histogram": ""}


def test_the_docs_list_the_metrics_that_the_server_has(server: Server) -> None:
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    for prefix in ("penstock_", "gen_ai_"):
        there = {family.name + SUFFIXES[family.type] for family in families if family.name.startswith(prefix)}
        there = {name for name in there if not name.endswith("_created")}
        assert set(re.findall(rf"`({prefix}\w+)`", DOC)) == there
    ours = {family.name.removeprefix("penstock_") for family in families if family.name.startswith("penstock_")}
    theirs = {family.name.removeprefix("vllm:") for family in families if family.name.startswith("vllm:")}
    assert ours - theirs == {"http_requests", "log_lines_dropped"} and not theirs - ours


def test_the_docs_tell_kinds_of_metrics_apart(server: Server) -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(server.get("/metrics").text)}
    for kind in SUFFIXES:
        table = DOC.partition(f"| {kind} | |")[2].partition("\n\n")[0]
        names = re.findall(r"`(penstock_\w+)`", table)
        assert names and all(
            kinds[name.removesuffix("_total") if kind == "counter" else name] == kind for name in names
        )


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
