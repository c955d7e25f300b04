"""`penstock bench`: runs the workloads of penstock.bench and shows them as a table and as JSON."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from penstock.bench.offline import run_cases
from penstock.bench.online import first_model, run_load
from penstock.bench.roofline import Machine, least_seconds, measure
from penstock.bench.timeline import Slo, summarise
from penstock.bench.workload import Case, Span, mixed, parse_cases
from penstock.cli.options import Flags
from penstock.cli.prepare import Prepared, prepare
from penstock.engine import launch

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

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
    """What `bench serve` sends."""

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


def show(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        table.add_row(*(_cell(key, row.get(key)) for _, key in columns))
    Console().print(table)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key == "roofline_fraction":
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def keep(rows: Any, path: str | None) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(rows, indent=2) + "\n")


def offline(
    model: str | None,
    cases: str,
    runs: int,
    json_file: str | None,
    flags: Flags,
    columns: Literal["throughput", "latency"],
) -> None:
    """Cases through an engine of their own process, without a server."""
    wanted = parse_cases(cases)
    prepared = prepare(model, {**_room_for(wanted), **flags})
    engine = prepared.resolved.engine
    console = Console(stderr=True)
    with console.status("measuring this machine's bandwidth and arithmetic"):
        machine = measure(engine.dtype, engine.threads)
    rows = asyncio.run(_run(prepared, wanted, runs))
    size = ELEMENT_BYTES[engine.dtype]
    for case, row in zip(wanted, rows, strict=True):
        least = least_seconds(case, prepared.spec, size, machine)
        row["roofline_fraction"] = round(least / row["elapsed_s"], 4)
        row["roofline"] = {
            "bandwidth_gb_s": round(machine.bandwidth / 1e9, 1),
            "gflop_s": round(machine.flops / 1e9, 1),
        }
    show(f"{engine.name}, {engine.dtype}: {_machine(machine)}", COLUMNS[columns], rows)
    keep(rows, json_file)


def _room_for(cases: Sequence[Case]) -> dict[str, Any]:
    """Settings under which every case runs as one batch. A flag the user gives wins."""
    longest = max(case.prompt_len + case.output_len for case in cases)
    return {"max_model_len": longest + 16, "max_num_seqs": max(32, *(case.count for case in cases))}


def _machine(machine: Machine) -> str:
    return f"roofline at {machine.bandwidth / 1e9:.1f} GB/s and {machine.flops / 1e9:.0f} GFLOP/s, measured just now"


async def _run(prepared: Prepared, cases: Sequence[Case], runs: int) -> list[dict[str, Any]]:
    client = await launch(prepared.resolved.engine)
    try:
        return await run_cases(client, cases, runs)
    finally:
        await client.close()


def online(url: str, model: str | None, api_key: str | None, load: Load, json_file: str | None) -> None:
    """Load on a running server."""
    slo = Slo.parse(load.slo) if load.slo else None
    items = mixed(
        load.num_prompts,
        Span.parse(load.input_len),
        Span.parse(load.output_len),
        load.vocab_size,
        shared_prefix=load.shared_prefix,
        rate=load.request_rate,
        burstiness=load.burstiness,
        seed=load.seed,
    )

    async def go() -> dict[str, Any]:
        name = model or await first_model(url, api_key)
        lines, elapsed = await run_load(url, name, items, concurrency=load.concurrency, api_key=api_key)
        failures = sorted({line.error for line in lines if line.error})
        return {"model": name, "url": url, **summarise(lines, elapsed, slo), "errors": failures[:5]}

    result = asyncio.run(go())
    table = Table(title=f"{result['model']} at {url}", title_justify="left", show_header=False)
    for key, value in result.items():
        if key not in ("model", "url", "errors"):
            table.add_row(key, _cell(key, value))
    Console().print(table)
    for error in result["errors"]:
        Console(stderr=True).print(f"failed: {error}", style="red", markup=False)
    keep(result, json_file)
