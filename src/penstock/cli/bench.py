"""`penstock bench`: runs the workloads of penstock.bench and shows them as a table and as JSON."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from penstock.bench.offline import WARM_UP, run_cases
from penstock.bench.online import first_model, run_load
from penstock.bench.roofline import Machine, Probe, least_seconds, measure
from penstock.bench.timeline import Slo, summarise
from penstock.bench.workload import Case, Span, mixed, parse_cases
from penstock.cli.engine import own_engine
from penstock.cli.options import Flags
from penstock.cli.output import check_file, write_file
from penstock.cli.prepare import Prepared
from penstock.cli.room import Room, prepare_room
from penstock.config import EngineConfig, stored_as
from penstock.families import model_facts

PROBE_SECONDS = 0.25  # of each rate, before and after each case

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
        name = heading in ("case", "op", "shape")
        table.add_column(heading, justify="left" if name else "right", no_wrap=name)
    for row in rows:
        table.add_row(*(_cell(key, row.get(key)) for _, key in columns))
    Console().print(table)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key in ("roofline_fraction", "share"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def keep(rows: Any, path: str | None) -> None:
    write_file("--json", path, json.dumps(rows, indent=2) + "\n")


def offline(
    model: str | None,
    cases: str,
    runs: int,
    json_file: str | None,
    flags: Flags,
    columns: Literal["throughput", "latency"],
) -> None:
    """Cases through an engine of their own process, without a server."""
    check_file("--json", json_file)
    wanted = parse_cases(cases)
    prepared = prepare_room(model, flags, _room_for(wanted))
    engine = prepared.resolved.engine
    rows = asyncio.run(_run(prepared, wanted, runs))
    roofline = "benchmarks/gpu.py measures a GPU's roofline"
    if engine.device == "cpu":
        roofline = "the roofline is of the machine as it was just before and after each case"
        _add_roofline(rows, wanted, prepared)
    show(f"{engine.name}, {engine.dtype}: {roofline}", COLUMNS[columns], rows)
    keep(rows, json_file)


def _add_roofline(rows: list[dict[str, Any]], cases: Sequence[Case], prepared: Prepared) -> None:
    """In the place of each row's "machine"."""
    facts = model_facts(prepared.spec)
    for case, row in zip(cases, rows, strict=True):
        machine: Machine = row.pop("machine")
        row["roofline"] = {
            "bandwidth_gb_s": round(machine.bandwidth / 1e9, 1),
            "gflop_s": round(machine.flops / 1e9, 1),
            "gemm_gflop_s": round(machine.gemm_flops / 1e9, 1),
        }
        with_gemm = msgspec.structs.replace(machine, flops=machine.gemm_flops)
        for key, limit in (("roofline_fraction", machine), ("gemm_roofline_fraction", with_gemm)):
            least = least_seconds(case, facts, prepared.resolved.engine, limit)
            row[key] = round(least / row["elapsed_s"], 4)


STEP_COLUMNS = (
    ("op", "name"),
    ("calls", "calls"),
    ("µs/step", "us"),
    ("share", "share"),
    ("GB/s", "gb_s"),
    ("GFLOP/s", "gflop_s"),
    ("of roofline", "roofline_fraction"),
)


def step(
    model: str | None,
    rows: str,
    context: int,
    prompt: int,
    steps: int,
    plot: str | None,
    json_file: str | None,
    flags: Flags,
) -> None:
    """Steps of a runner in this process, that decode or compute prompts."""
    from penstock.bench.flame import flame
    from penstock.bench.step import Steps, room
    from penstock.runtime.load import load_host_runner

    check_file("--json", json_file)
    check_file("--plot", plot)
    cases = parse_counts("--rows", rows)
    if not context and not prompt:
        raise ValueError("--context 0: a sequence that decodes has a token before it; set --context 1, or --prompt N")
    asked = f"--context {context} with --rows {rows} and " + (f"--prompt {prompt}" if prompt else f"--steps {steps}")
    longest = room(context, cases, steps, prompt)
    prepared = prepare_room(model, flags, Room(asked, longest, 0, max(cases), max(cases) * prompt))
    engine = prepared.resolved.engine
    if engine.device == "cuda":
        raise ValueError("--device is cuda, but this times the ops of a CPU's native kernels: set --device cpu")
    machine = _measured(engine)
    found = Steps(load_host_runner(engine), context, cases, steps, prompt).measure(machine)
    doing = f"x {prompt} tokens of prompt behind" if prompt else "decoding at"
    for each in found:
        title = (
            f"{engine.name}, {stored_as(engine)}: {each.rows} {doing} {each.context} tokens of context; "
            f"{each.wall_us:,.0f} µs by the clock"
        )
        show(title, STEP_COLUMNS, [msgspec.to_builtins(line) for line in each.lines])
    Console().print(
        f"[dim]{_machine(machine)}; an op of these that computes faster raises it, and what stays in the processor's "
        "caches may pass it[/dim]"
    )
    keep(msgspec.to_builtins(found), json_file)
    if plot is not None:
        drawn = flame(found, f"Where a step's time goes: {engine.name}, {stored_as(engine)}")
        write_file("--plot", plot, drawn)


KERNEL_COLUMNS = (
    ("op", "op"),
    ("shape", "shape"),
    ("dtype", "dtype"),
    ("rows", "rows"),
    ("µs", "us"),
    ("GB/s", "gb_s"),
    ("GFLOP/s", "gflop_s"),
    ("of roofline", "roofline_fraction"),
)


def kernels(isa: str | None, threads: int, ops: str | None, json_file: str | None) -> None:
    """Native ops by themselves, in this process."""
    import torch

    from penstock.bench.kernels import OPS, measure_kernels
    from penstock.kernels.native.loader import instruction_sets
    from penstock.kernels.native.session import native_session

    check_file("--json", json_file)
    wanted = list(OPS) if ops is None else ops.split(",")
    if unknown := [op for op in wanted if op not in OPS]:
        raise ValueError(f"--ops {unknown[0]}: there are {', '.join(OPS)}")
    available = instruction_sets()
    if isa not in (None, *available) or not available:
        raise ValueError(f"--isa {isa or '(default)'}: this build and processor have {', '.join(available) or 'none'}")
    cores = len(os.sched_getaffinity(0))
    if threads > cores:
        raise ValueError(f"--threads {threads}: this process may use {cores} cores; set --threads {cores} or less")
    threads = threads or cores
    with Console(stderr=True).status("measuring this machine's bandwidth and arithmetic") as status:
        torch_reaches = measure("bfloat16", threads)
        torch.set_num_threads(1)
        session = native_session(isa or "", threads)
        found, machine = measure_kernels(session, torch_reaches, wanted, status.update)
    rows = [msgspec.to_builtins(each) for each in found]
    show(f"Native kernels, {session.team.isa}, {threads} threads", KERNEL_COLUMNS, rows)
    Console().print(
        f"[dim]The roofline is the better of what torch reaches ({torch_reaches.bandwidth / 1e9:.1f} GB/s, "
        f"{torch_reaches.flops / 1e9:.0f} GFLOP/s) and the best of these, arithmetic by dtype: "
        f"{machine.bandwidth / 1e9:.1f} GB/s, up to {machine.flops / 1e9:.0f} GFLOP/s.[/dim]"
    )
    roofline = {"torch": msgspec.to_builtins(torch_reaches), "best": msgspec.to_builtins(machine)}
    keep({"isa": session.team.isa, "threads": threads, "machine": roofline, "kernels": rows}, json_file)


def parse_counts(flag: str, text: str) -> list[int]:
    """The distinct numbers, of at least 1, in a text such as 1,8,32. ValueError names the flag."""
    try:
        counts = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(f"{flag} {text}: give whole numbers of at least 1, with commas between them")
    return counts


def _room_for(cases: Sequence[Case]) -> Room:
    """In which every case runs as one batch."""
    longest = max((WARM_UP, *cases), key=_tokens)
    asked = "the warm-up" if longest is WARM_UP else f"--cases {longest}"
    return Room(asked, _tokens(longest), 16, max(32, *(case.count for case in cases)))


def _tokens(case: Case) -> int:
    return case.prompt_len + case.output_len


def _span(flag: str, text: str) -> Span:
    try:
        return Span.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _why(error: Exception) -> str:
    """Few of aiohttp's errors say by themselves what they are."""
    return f"{type(error).__name__}: {error}"


def _measured(engine: EngineConfig) -> Machine:
    """What this machine's processor can do for the engine's arithmetic."""
    with Console(stderr=True).status("measuring this machine's bandwidth and arithmetic"):
        return measure(engine.dtype, engine.threads, engine.quantization)


def _machine(machine: Machine) -> str:
    return f"roofline at {machine.bandwidth / 1e9:.1f} GB/s and {machine.flops / 1e9:.0f} GFLOP/s, measured just now"


async def _run(prepared: Prepared, cases: Sequence[Case], runs: int) -> list[dict[str, Any]]:
    engine = prepared.resolved.engine
    probe = None
    if engine.device == "cpu":
        probe = partial(Probe(engine.dtype, engine.threads, engine.quantization), PROBE_SECONDS)
    async with own_engine(engine) as client:
        return await run_cases(client, cases, runs, probe)


def online(url: str, model: str | None, api_key: str | None, load: Load, json_file: str | None) -> None:
    """Load on a running server. Exits with status 1 where it answered nothing."""
    check_file("--json", json_file)
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url {url} is no address of a server: write it as http://{url}")
    url = url.rstrip("/").removesuffix("/v1")  # clients are given the address with it
    for flag, value in (("--request-rate", load.request_rate), ("--burstiness", load.burstiness)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag} is {value:g}: give a number above 0")
    slo = Slo.parse(load.slo) if load.slo else None
    items = mixed(
        load.num_prompts,
        _span("--input-len", load.input_len),
        _span("--output-len", load.output_len),
        load.vocab_size,
        shared_prefix=load.shared_prefix,
        rate=load.request_rate,
        burstiness=load.burstiness,
        seed=load.seed,
    )

    async def go() -> dict[str, Any]:
        try:
            name = model or await first_model(url, api_key)
        except (aiohttp.ClientError, TimeoutError, LookupError) as error:
            raise ValueError(f"--url {url} does not list models ({_why(error)}): is a server running there?") from None
        lines, elapsed = await run_load(url, name, items, concurrency=load.concurrency, api_key=api_key)
        failures = sorted({line.error for line in lines if line.error})
        return {"model": name, "url": url, **summarise(lines, elapsed, slo), "errors": failures[:5]}

    result = asyncio.run(go())
    Console().print(f"{result['model']} at {url}", style="italic", markup=False, soft_wrap=True)
    table = Table(show_header=False)
    for key, value in result.items():
        if key not in ("model", "url", "errors"):
            table.add_row(key, _cell(key, value))
    Console().print(table)
    for error in result["errors"]:
        Console(stderr=True).print(f"failed: {error}", style="red", markup=False, soft_wrap=True)
    keep(result, json_file)
    if result["failed"] == result["requests"]:
        sys.exit(1)
