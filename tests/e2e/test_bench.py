"""The benchmarks a user runs, and `penstock run`, on the embedded model."""

import json
import re
from pathlib import Path

import pytest

from penstock.weights.packaged import EMBEDDED
from tests.cli.test_help import penstock
from tests.e2e.server import Server

SMALL = ("--threads", "1", "--kv-cache-memory", "32MiB")


def test_throughput_writes_its_figures_beside_the_roofline(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = penstock(
        *("bench", "throughput", EMBEDDED, "--cases", "1x16/4,3x20/6", "--runs", "1", "--json", str(file)),
        *("--threads", "1", "--dtype", "float32"),  # what the machine gives is measured in this alone then
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [(row["case"], row["output_tokens"]) for row in rows] == [("1x16/4", 4), ("3x20/6", 18)]
    for row in rows:
        assert row["failed"] == 0
        assert row["output_tokens"] / row["output_tok_s"] == pytest.approx(row["elapsed_s"], abs=0.0006, rel=0.001)
        assert 0 < row["roofline_fraction"] < 1
        assert row["host_us_per_step"] > 0
        assert row["steps"] >= 4
        assert row["peak_memory_bytes"] > row["weights_bytes"] > 0
        assert row["case"] in done.stdout


def test_a_running_server_is_loaded_and_its_goodput_counted(tmp_path: Path, server: Server) -> None:
    file = tmp_path / "out.json"
    done = penstock(
        *("bench", "serve", "--url", server.url, "--num-prompts", "12", "--input-len", "5-20", "--output-len", "4"),
        *("--request-rate", "40", "--burstiness", "0.5", "--slo", "ttft=60,tpot=60", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert (result["requests"], result["failed"], result["output_tokens"]) == (12, 0, 48)
    assert result["goodput_s"] == pytest.approx(result["requests_s"], rel=0.01)
    assert result["ttft_ms_p50"] <= result["ttft_ms_p99"] <= result["e2e_ms_p99"]


def test_a_server_is_found_by_the_address_that_clients_have_and_failing_is_told(server: Server) -> None:
    small = ("--num-prompts", "2", "--output-len", "1")
    done = penstock("bench", "serve", "--url", server.url + "/v1/", "--input-len", "5", *small)
    assert done.returncode == 0 and "failed │ 0" in " ".join(done.stdout.split()), done.stderr
    done = penstock("bench", "serve", "--url", server.url, "--model", "no-such-model", *small)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "penstock: all 2 requests failed: status 404: model 'no-such-model' is not served here; this server has "
        "'python-8m'\n"
    )


def test_a_load_that_takes_time_says_how_far_it_is(server: Server) -> None:
    """2 requests a second arrive, so that it takes 3 seconds and more."""
    load = ("--num-prompts", "8", "--output-len", "1", "--request-rate", "2", "--seed", "1")
    done = penstock("bench", "serve", "--url", server.url, *load)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^(\d+) of 8 requests finished \(\d+ s\)$", done.stderr, re.MULTILINE)
    counts = [int(count) for count in lines]
    assert len(lines) >= 2 and counts == sorted(counts) and counts[-1] > 0


def test_run_completes_a_text_and_says_the_same_again() -> None:
    flags = ("--raw", "--max-tokens", "12", "--seed", "1", *SMALL)
    first, second = (penstock("run", EMBEDDED, *flags, stdin="def main():\n") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout != ""
