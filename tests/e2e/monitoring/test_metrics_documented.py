"""docs/monitoring.md, compared with a running server."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from penstock.observe.series import OLDER
from tests.e2e.server import Server

DOC = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
SUFFIXES = {"counter": "_total", "gauge": "", "histogram": ""}
ONLY_OURS = {
    *("http_requests", "http_requests_in_flight", "log_lines_dropped", "tls_certificate_not_after_seconds"),
    *("engine_resident_memory_bytes", "engine_cpu_seconds"),
    *("machine_read_bytes_per_second", "machine_flops_per_second", "model_info", "reloads"),
    *("storage_bytes", "storage_free_bytes", "storage_errors", "storage_responses_deleted"),
}


def test_the_docs_list_the_metrics_that_the_server_has(server: Server) -> None:
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    for prefix in ("penstock_", "gen_ai_"):
        there = {family.name + SUFFIXES[family.type] for family in families if family.name.startswith(prefix)}
        there = {name for name in there if not name.endswith("_created")}
        assert set(re.findall(rf"`({prefix}\w+)`", DOC)) == there
    ours = {family.name.removeprefix("penstock_") for family in families if family.name.startswith("penstock_")}
    theirs = {family.name.removeprefix("vllm:") for family in families if family.name.startswith("vllm:")}
    assert ours - theirs == ONLY_OURS
    assert theirs - ours == {*OLDER, "lora_requests_info"}
    names = {f"vllm:{family}" for family in theirs} | {f"vllm:{family}_total" for family in theirs}
    aliases = DOC.partition("| also there")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(vllm:\w+)`", aliases))
    assert named <= names and theirs - ours <= {name[5:].removesuffix("_total") for name in named}


def test_the_docs_tell_kinds_of_metrics_apart(server: Server) -> None:
    kinds = {family.name: family.type for family in text_string_to_metric_families(server.get("/metrics").text)}
    for kind in SUFFIXES:
        table = DOC.partition(f"| {kind} | |")[2].partition("\n\n")[0]
        names = re.findall(r"`(penstock_\w+)`", table)
        assert names and all(
            kinds[name.removesuffix("_total") if kind == "counter" else name] == kind for name in names
        )
