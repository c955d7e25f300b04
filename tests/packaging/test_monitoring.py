"""Alert rules and dashboard: Prometheus's own tool accepts them, and the server has every metric that they read."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from penstock.frontend.http.access import OPEN_PATHS
from penstock.messages import EngineStats
from penstock.observe.fleet import FleetSeries
from penstock.observe.metrics import Metrics
from tests.observe.test_metrics import Engine

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging" / "monitoring"
DOC = (ROOT / "docs" / "monitoring.md").read_text()
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$instance": ".*"}
NAME = re.compile(r"\b(?:penstock|process)_\w+")


def promtool(*arguments: object, folder: Path = FOLDER) -> str:
    """What promtool says; it must succeed."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    done = subprocess.run(["promtool", *map(str, arguments)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def queries() -> Iterator[str]:
    """The expressions of the dashboard, with values for its variables."""
    found = dashboard()
    for query in [
        *(target["expr"] for panel in found["panels"] for target in panel.get("targets", ())),
        *(annotation["expr"] for annotation in found["annotations"]["list"]),
    ]:
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        assert "$" not in query
        yield query


def there() -> set[str]:
    """The names of all samples of a server."""
    metrics = Metrics(CollectorRegistry())
    metrics.http_request("GET", "/", 200)
    model = metrics.model("m", Engine())
    model.choice_finished("chat", "stop", 2, 0.1)
    engine = SimpleNamespace(name="a", requests=1, moved=0, prompt_tokens=9, cached_tokens=3, status="ready")
    engine.open_requests, engine.stats, engine.region, engine.round_trip = 1, EngineStats(), "north", 0.01
    FleetSeries(metrics.registry, SimpleNamespace(replicas=[engine], moves={"ended": 1}, held=0, expected=2))
    names: set[str] = set()
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_has_a_test_and_a_line_in_the_docs() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 10
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    tested = [test["name"].partition(",")[0] for test in tests]  # what follows is one of several cases
    assert list(dict.fromkeys(tested)) == [*names, "a healthy server"]
    table = DOC.partition("| alert |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == names
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


def test_shares_count_the_same_requests_above_and_below_the_line() -> None:
    """A share of more than 100% is of other requests than it counts."""
    routes = frozenset(path.decode() for path in OPEN_PATHS)
    for expression in [rule["expr"] for rule in rules()]:
        selectors = re.findall(r"penstock_http_requests_total{([^}]*)}", expression)
        if len(selectors) < 2:
            continue
        counted, all_requests = ({part for part in each.split(", ") if "route" in part} for each in selectors)
        assert counted == all_requests
        (left_out,) = re.findall(r'route!~"(.*)"', "".join(counted))
        assert {route for route in routes if re.fullmatch(left_out, route)} == routes
        assert not re.fullmatch(left_out, "/v1/completions")


def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    records = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", "queries.yml", folder=tmp_path)


def test_the_server_has_every_metric_that_they_read() -> None:
    read = {name for text in [*queries(), *(rule["expr"] for rule in rules())] for name in NAME.findall(text)}
    assert len(read) > 25
    assert read - there() == set()


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
