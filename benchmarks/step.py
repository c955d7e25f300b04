"""Where the time of a step goes, decoding or prefill: op by op, and the host's part of it.

    python benchmarks/step.py MODEL_DIR --plot step.svg --json benchmarks/results/avx512/step.json

MODEL_DIR and the flags of the engine are those of `penstock serve`.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from calm import Watch, said
from op_timing.flame import flame
from op_timing.step_timer import StepBreakdown, StepTimer, longest_sequence
from results import JSON, run_command, save
from rich.console import Console

from penstock.bench.roofline import MachineRates, measure
from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.cli.options import ENGINE, Flags, takes
from penstock.cli.output import show_table, write_file
from penstock.config import EngineConfig, stored_as
from penstock.prepare.files import check_file
from penstock.runtime.loading.cpu import load_cpu_runner

COLUMNS = (
    ("op", "name"),
    ("calls", "calls"),
    ("µs/step", "us"),
    ("share", "share"),
    ("GB/s", "gb_s"),
    ("GFLOP/s", "gflop_s"),
    ("of roofline", "roofline_fraction"),
)
PATIENCE = 20.0  # seconds that all steps together wait for calm cores


@takes(ENGINE)
def step(
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Default: the embedded model.")] = None,
    rows: Annotated[str, typer.Option(help="Sequences in a step; several numbers, comma-separated.")] = "1,8,32",
    context: Annotated[int, typer.Option(min=0, help="Tokens that each sequence has in the KV cache.")] = 256,
    prompt: Annotated[
        int, typer.Option(min=0, metavar="N", help="Prefill N tokens of each sequence. Default: 0, decode.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps for each of --rows; medians are shown.")] = 40,
    plot: Annotated[str | None, typer.Option(metavar="FILE.svg", help="Also draw the steps into this file.")] = None,
    json_file: Annotated[str | None, JSON] = None,
    flags: Flags,
) -> None:
    """Times each op of a step on the CPU's native kernels."""
    check_file("--json", json_file)
    check_file("--plot", plot)
    counts = parse_counts("--rows", rows)
    if not context and not prompt:
        raise ValueError("--context 0: a decode step needs a token in the KV cache; set --context 1, or --prompt N")
    asked_by = f"--context {context} with --rows {rows} and " + (f"--prompt {prompt}" if prompt else f"--steps {steps}")
    longest, most = longest_sequence(context, counts, steps, prompt), max(counts)
    engine = prepare_sized(model, flags, BenchSizes(asked_by, longest, most, step_tokens=most * prompt)).resolved.engine
    if engine.device == "cuda":
        raise ValueError("--device is cuda, but this times the ops of a CPU's native kernels: set --device cpu")
    watch = Watch(PATIENCE)
    watch.wait()
    machine = measured_machine(engine)
    found = StepTimer(load_cpu_runner(engine), context, counts, steps, prompt).measure(machine, watch)
    show(engine, machine, found)
    save({"benchmark": "step", "model": engine.name, "weights": stored_as(engine), "steps": found}, json_file)
    if plot is not None:
        write_file("--plot", plot, flame(found, f"Where a step's time goes: {engine.name}, {stored_as(engine)}"))


def parse_counts(flag: str, text: str) -> list[int]:
    """The different numbers in a text such as 1,8,32. ValueError names the flag if one is not a number above 0."""
    try:
        counts = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(f"{flag} {text}: give whole numbers of at least 1, separated by commas")
    return counts


def measured_machine(engine: EngineConfig) -> MachineRates:
    """The rates that this machine reaches with the engine's types."""
    with Console(stderr=True).status("measuring this machine's bandwidth and arithmetic"):
        return measure(engine.dtype, engine.threads, engine.quantization)


def show(engine: EngineConfig, machine: MachineRates, found: Sequence[StepBreakdown]) -> None:
    """Prints a table for each step, and the rates that the rooflines come from."""
    for each in found:
        work = f"prefill {each.prompt} tokens each behind" if each.prompt else "decode at"
        title = (
            f"{engine.name}, {stored_as(engine)}: {each.rows} {work} {each.context} tokens of context; "
            f"{each.wall_us:,.0f} µs by the clock; cores: {said(each.calm)}"
        )
        show_table(title, COLUMNS, [msgspec.to_builtins(part) for part in each.lines])
    Console().print(
        f"[dim]Roofline at {machine.bandwidth / 1e9:.1f} GB/s and {machine.flops / 1e9:.0f} GFLOP/s, measured before "
        "the steps. An op that computes faster raises it. An op whose data stays in the caches may exceed it.[/dim]"
    )


if __name__ == "__main__":
    run_command(step)
