"""Implements `penstock bench`: runs benchmarks, prints their figures as a table and writes them as JSON."""

import asyncio
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from penstock.bench.offline import WARM_UP, run_cases
from penstock.bench.one_shot import UnsuitableModel, one_shot
from penstock.bench.online import Send, first_model, run_load
from penstock.bench.roofline import MachineProbe, MachineRates, least_seconds
from penstock.bench.timeline import Slo, summarise
from penstock.bench.workload import Case, LengthRange, WorkloadRequest, mixed, parse_cases
from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.cli.options import Flags
from penstock.cli.output import cell, show_table, write_json
from penstock.cli.top.scrape import NoServer, no_answer
from penstock.config.texts import checked_flag
from penstock.observe.reporting import reporting
from penstock.prepare.engine import own_engine
from penstock.prepare.files import check_file
from penstock.prepare.model import PreparedModel

WIRES = ("openai", "kserve")  # of `penstock bench serve`
PROBE_SECONDS = 0.25  # for each rate that is measured before and after a case

COLUMNS: Mapping[str, Sequence[tuple[str, str]]] = {
    "throughput": (
        ("case", "case"),
        ("output tok/s", "output_tok_s"),
        ("seconds", "elapsed_s"),
        ("of roofline", "roofline_fraction"),
        ("host µs/step", "host_us_per_step"),
        ("forward ms/step", "forward_ms_per_step"),
    ),
    "latency": (
        ("case", "case"),
        ("TTFT p50 ms", "ttft_ms_p50"),
        ("p99", "ttft_ms_p99"),
        ("TPOT p50 ms", "tpot_ms_p50"),
        ("p99", "tpot_ms_p99"),
        ("E2E p50 ms", "e2e_ms_p50"),
        ("of roofline", "roofline_fraction"),
        ("host µs/step", "host_us_per_step"),
    ),
}


@dataclass(frozen=True)
class Load:
    """Holds the flags that describe the requests of `penstock bench serve`."""

    num_prompts: int
    input_len: str
    output_len: str
    shared_prefix: int
    vocab_size: int
    request_rate: float | None
    burstiness: float
    concurrency: int | None
    slo: str | None
    seed: int

    def items(self) -> list[WorkloadRequest]:
        """Returns the requests. Raises ValueError that names the wrong flag."""
        if self.request_rate is not None and not 0 < self.request_rate < math.inf:
            raise ValueError(f"--request-rate is {self.request_rate:g}: give a number above 0")
        if not self.burstiness > 0:
            raise ValueError(f"--burstiness is {self.burstiness:g}: give a number above 0, or inf for equal gaps")
        return mixed(
            self.num_prompts,
            _length_range("--input-len", self.input_len),
            _length_range("--output-len", self.output_len),
            self.vocab_size,
            shared_prefix=self.shared_prefix,
            rate=self.request_rate,
            burstiness=self.burstiness,
            seed=self.seed,
        )


def offline(
    model: str | None,
    cases: str,
    runs: int,
    json_file: str | None,
    flags: Flags,
    columns: Literal["throughput", "latency"],
) -> None:
    """Runs cases on a new engine, without a server."""
    check_file("--json", json_file)
    parsed = parse_cases(cases)
    prepared = prepare_sized(model, flags, _sizes(parsed))
    engine = prepared.resolved.engine
    with reporting("measuring the machine") as say:
        rows = asyncio.run(_run(prepared, parsed, runs, say))
    roofline = "benchmarks/gpu.py measures a GPU's roofline"
    if engine.device == "cpu":
        roofline = "the roofline is the machine's, measured just before and after each case"
        _add_roofline(rows, parsed, prepared)
    show_table(f"{engine.name}, {engine.dtype}: {roofline}", COLUMNS[columns], rows)
    write_json(json_file, rows)


async def _run(
    prepared: PreparedModel, cases: Sequence[Case], runs: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    engine = prepared.resolved.engine
    probe = None
    if engine.device == "cpu":
        probe = partial(MachineProbe(engine.dtype, engine.threads, engine.quantization), PROBE_SECONDS)
    say(f"starting the engine for {engine.name}")
    async with own_engine(engine) as client:
        return await run_cases(client, cases, runs, probe, say)


def _add_roofline(rows: list[dict[str, Any]], cases: Sequence[Case], prepared: PreparedModel) -> None:
    """Replaces the "machine" of each row with its rates and with the row's share of the roofline."""
    facts = prepared.facts
    for case, row in zip(cases, rows, strict=True):
        machine: MachineRates = row.pop("machine")
        row["roofline"] = {
            "bandwidth_gb_s": round(machine.bandwidth / 1e9, 1),
            "gflop_s": round(machine.flops / 1e9, 1),
            "gemm_gflop_s": round(machine.gemm_flops / 1e9, 1),
        }
        with_gemm = msgspec.structs.replace(machine, flops=machine.gemm_flops)
        for key, limit in (("roofline_fraction", machine), ("gemm_roofline_fraction", with_gemm)):
            least = least_seconds(case, facts, prepared.resolved.engine, limit)
            row[key] = round(least / row["elapsed_s"], 4)


def _sizes(cases: Sequence[Case]) -> BenchSizes:
    """Returns the limits with which every case runs as one batch."""
    longest = max((WARM_UP, *cases), key=lambda case: case.prompt_len + case.output_len)
    asked_by = "the warm-up" if longest is WARM_UP else f"--cases {longest}"
    sequences = max(32, *(case.count for case in cases))
    return BenchSizes(asked_by, longest.prompt_len + longest.output_len, sequences, spare=16)


def online(
    url: str, model: str | None, api_key: str | None, load: Load, json_file: str | None, wire: str = "openai"
) -> None:
    """Loads a running server. Exits with status 1 and one line if every request failed. Raises ValueError that names
    the wrong flag."""
    check_file("--json", json_file)
    checked_flag("--api-key", api_key)
    if model == "":
        raise ValueError("--model is '': it is empty; give a value, or leave it out")
    if wire not in WIRES:
        raise ValueError(f"--wire is {wire!r}; give {' or '.join(WIRES)}")
    if wire == "kserve" and model is None:
        raise ValueError("--wire kserve needs --model: the name of a one-shot model of the server's repository")
    if not re.match(r"https?://[^/\s]", url):
        host = url.partition("://")[2].strip("/") if "://" in url else url
        raise ValueError(f"--url is {url!r}, which is not an address: write --url http://{host or '127.0.0.1:8000'}")
    url = url.rstrip("/").removesuffix("/v1")  # OpenAI's clients take the address with /v1
    slo = None if load.slo is None else Slo.parse(load.slo)
    with reporting(f"asking {url} for its models") as say:
        result = asyncio.run(_load_server(url, model, api_key, load.items(), load.concurrency, slo, say, wire))
    if wire == "kserve":  # an answer comes as a whole: these have no meaning
        result = {key: value for key, value in result.items() if not key.startswith(("output_", "ttft", "tpot", "itl"))}
    if result["failed"] == result["requests"]:
        write_json(json_file, result)
        print(f"penstock: all {result['requests']} requests failed: {result['errors'][0]}", file=sys.stderr)
        sys.exit(1)
    Console().print(f"{result['model']} at {url}", style="italic", markup=False, soft_wrap=True)
    table = Table(show_header=False)
    for key, value in result.items():
        if key not in ("model", "url", "errors"):
            table.add_row(key, cell(key, value))
    Console().print(table)
    for error in result["errors"]:
        Console(stderr=True).print(f"failed: {error}", style="red", markup=False, soft_wrap=True)
    write_json(json_file, result)


async def _load_server(
    url: str,
    model: str | None,
    api_key: str | None,
    items: Sequence[WorkloadRequest],
    concurrency: int | None,
    slo: Slo | None,
    say: Callable[[str], None],
    wire: str,
) -> dict[str, Any]:
    """Returns the figures, and the first five different errors. Raises NoServer if the server lists no models."""
    send: Send | None = None
    try:
        name = model or await first_model(url, api_key)
        if wire == "kserve":
            send = await one_shot(url, name, api_key)
    except aiohttp.ClientSSLError as error:
        inner = getattr(error, "certificate_error", None) or error.os_error
        raise NoServer(f"--url {no_answer(url, inner)}") from None
    except aiohttp.ClientConnectorError as error:
        code, text = error.os_error.errno, error.os_error.strerror
        why = os.strerror(code) if code and code > 0 else text  # below 0: of getaddrinfo
        raise NoServer(f"--url {url} does not answer ({why}): is a server running there?") from None
    except aiohttp.ClientResponseError as error:
        raise NoServer(f"--url {url} does not list its models: {_explain(error)}") from None
    except UnsuitableModel:
        raise
    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
        if url.startswith("http:") and isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
            raise NoServer(f"--url {url} closes connections: write https:// if the server has a certificate") from None
        why = f"{type(error).__name__}: {error}"  # many of aiohttp's messages make no sense without the type
        raise NoServer(f"--url {url} does not list its models ({why}): is a server running there?") from None
    lines, elapsed = await run_load(url, name, items, concurrency=concurrency, api_key=api_key, say=say, send=send)
    errors = sorted({line.error for line in lines if line.error})
    return {"model": name, "url": url, **summarise(lines, elapsed, slo), "errors": errors[:5]}


def _explain(error: aiohttp.ClientResponseError) -> str:
    match error.status:
        case 401 | 403:
            return f"status {error.status}; set PENSTOCK_API_KEY to a key that it accepts"
        case 404:
            return "status 404; give the address of a server with OpenAI's API, without a path"
    return f"status {error.status}, {error.message}"


def _length_range(flag: str, text: str) -> LengthRange:
    try:
        return LengthRange.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
