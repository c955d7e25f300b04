"""Every native op by itself: GB/s, GFLOP/s and share of the roofline, with weights read from memory.

python benchmarks/kernels.py --ops linear,attention --json benchmarks/results/avx512/kernels.json
"""

from typing import Annotated

import msgspec
import torch
import typer
from calm import Watch, said
from op_timing.kernel_cases import OPS, measure_kernels
from results import CORES, JSON, run_command, save
from rich.console import Console

from penstock.bench.roofline import measure
from penstock.cli.output import show_table
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.session import native_session
from penstock.prepare.files import check_file

COLUMNS = (
    ("op", "op"),
    ("shape", "shape"),
    ("dtype", "dtype"),
    ("rows", "rows"),
    ("µs", "us"),
    ("GB/s", "gb_s"),
    ("GFLOP/s", "gflop_s"),
    ("of roofline", "roofline_fraction"),
    ("cores", "cores"),
)
PATIENCE = 40.0  # seconds that all cases together wait for calm cores


def kernels(
    *,
    isa: Annotated[str | None, typer.Option(help="Instruction set. Default: the best of this machine.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads that compute. Default: one for each core.")] = 0,
    ops: Annotated[str | None, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(OPS)}.")] = None,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    """Times each native op on shapes of real models."""
    check_file("--json", json_file)
    wanted = list(OPS) if ops is None else ops.split(",")
    if unknown := [op for op in wanted if op not in OPS]:
        raise ValueError(f"--ops {unknown[0]} is not an op: choose from {', '.join(OPS)}")
    available = instruction_sets()
    if isa not in (None, *available) or not available:
        raise ValueError(f"--isa {isa or '(default)'}: this build and processor have {', '.join(available) or 'none'}")
    if threads > CORES:
        raise ValueError(f"--threads {threads}: this process may use {CORES} cores; set --threads {CORES} or less")
    isa, threads = isa or available[0], threads or CORES
    with Console(stderr=True).status("measuring this machine's bandwidth and arithmetic") as status:
        watch = Watch(PATIENCE)
        watch.wait()
        torch_reaches = measure("bfloat16", threads)
        torch.set_num_threads(1)
        session = native_session(isa, threads)
        found, machine = measure_kernels(session, torch_reaches, wanted, status.update, watch)
    rows = [{**msgspec.to_builtins(each), "cores": said(each.calm)} for each in found]
    show_table(f"Native kernels, {isa}, {threads} threads", COLUMNS, rows)
    Console().print(
        f"[dim]The roofline is the better of torch's rates ({torch_reaches.bandwidth / 1e9:.1f} GB/s, "
        f"{torch_reaches.flops / 1e9:.0f} GFLOP/s) and the best rates in this table, arithmetic by dtype: "
        f"{machine.bandwidth / 1e9:.1f} GB/s, up to {machine.flops / 1e9:.0f} GFLOP/s.[/dim]"
    )
    roofline = {"torch": torch_reaches, "best": machine}
    figures = {"isa": isa, "threads": threads, "machine": roofline, "kernels": found}
    save({"benchmark": "kernels", **figures}, json_file)


if __name__ == "__main__":
    run_command(kernels)
