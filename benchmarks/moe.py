"""Measures a decode step of a mixture of experts against its roofline: the bytes of the chosen experts.

python benchmarks/moe.py --json benchmarks/results/avx512/moe.json
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from make_model import SHAPES, write_model
from op_timing.cost import OpCost
from op_timing.step_timer import HOST, WHOLE, StepBreakdown, StepPart, StepTimer
from results import parser, write

from penstock.bench.roofline import MachineRates, measure
from penstock.config import EngineConfig
from penstock.engine.processors import running_on
from penstock.messages import StepPlan
from penstock.runtime.loading.cpu import load_cpu_runner

MAIN, SMALL = "qwen3-30b-a3b-2-layers", "moe"  # layers of a real model, and a harder case: see make_model.py
CONTEXT = 256  # tokens of each sequence in the KV cache
BYTES, READS = 512 << 20, 9  # bytes of one read of memory; reads that a bandwidth is computed from
STEADY = (
    0.9  # least ratio of a round's two bandwidths. A round below it is left out: its steps had an unknown bandwidth
)
LEAST_STEADY = 5  # rounds that are needed
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "vocab_size",
)
DTYPES = {"none": "bfloat16", "int8": "int8", "int4": "int4"}


class Round(NamedTuple):
    """A measurement of all steps, with the machine's bandwidth before and after."""

    steps: list[StepBreakdown]  # one for each number of rows
    machine: MachineRates  # mean of before and after, or the rate at which the experts were read if that is higher
    best: float  # bytes per second of the fastest read
    steady: bool  # the bandwidths before and after agree


def read_rate(data: torch.Tensor) -> tuple[float, float]:
    """(median, best) bytes per second that torch's threads read from memory. The time of a step is a median, too."""
    rates = []
    for _ in range(READS):
        began = time.perf_counter()
        data.sum()
        rates.append(BYTES / (time.perf_counter() - began))
    return statistics.median(rates), max(rates)


def rounds(folder: Path, quantization: str, rows: list[int], count: int, steps: int, cpus: set[int]) -> list[Round]:
    """Measures the machine and the model in short turns, as the machine's speed changes with its other load.

    Each round has new sequences, so that all rounds have the same context.
    """
    config = EngineConfig(
        model=str(folder),
        name=folder.name,
        max_model_len=1024,
        max_num_seqs=max(rows),
        kv_cache_bytes=256 << 20,
        quantization=quantization,  # type: ignore[arg-type]
        threads=len(cpus),
    )
    data = torch.ones(BYTES // 8, dtype=torch.int64)

    with running_on(cpus):
        flops = measure(config.dtype, config.threads, quantization).flops

    def reads() -> tuple[float, float]:
        with running_on(cpus):
            torch.set_num_threads(config.threads)
            return read_rate(data)

    done = []
    runner = load_cpu_runner(config, progress=False)
    for _ in range(count):
        decoding = StepTimer(runner, CONTEXT, rows, steps)
        before = reads()
        found = decoding.measure(MachineRates(before[0], flops))
        after = reads()
        runner.execute(StepPlan(0, (), gone=tuple(range(max(rows)))))
        experts = [line for step in found for line in step.lines if line.name == "experts"]
        bandwidth = max((before[0] + after[0]) / 2, *((line.gb_s or 0.0) * 1e9 for line in experts))
        flops = max(flops, *((line.gflop_s or 0.0) * 1e9 for line in experts))
        steady = min(before[0], after[0]) >= STEADY * max(before[0], after[0])
        done.append(Round(found, MachineRates(bandwidth, flops), max(before[1], after[1]), steady))
    runner.close()
    return done


def least_us(line: StepPart, machine: MachineRates) -> float:
    """The least µs of a part, from the bytes that it reads and its multiplications; 0 for the host's parts."""
    done = OpCost((line.gb_s or 0.0) * 1e9, (line.gflop_s or 0.0) * 1e9)
    return line.us * done.least_seconds(machine)


def times_roofline(line: StepPart, machine: MachineRates) -> float:
    """The time of a part as a multiple of its least time."""
    return line.us / least_us(line, machine)


def times_ops(step: StepBreakdown, machine: MachineRates) -> float:
    """The time of a step as a multiple of its ops' least times. Some ops multiply for longer than they read."""
    return step.us / sum(least_us(line, machine) for line in step.lines if line.name != WHOLE)


def figures(shape: str, quantization: str, index: int, done: list[Round]) -> dict[str, Any]:
    """The figures of the `index`-th number of rows: medians over the rounds with a steady bandwidth."""
    taken = len(done)
    done = [each for each in done if each.steady]
    if len(done) < LEAST_STEADY:
        raise SystemExit(
            f"the bandwidth was steady in {len(done)} of {taken} rounds, but {LEAST_STEADY} are needed: run this again"
        )
    steps = [each.steps[index] for each in done]

    def median(of: Callable[[StepBreakdown, MachineRates], float], digits: int) -> float:
        values = (of(step, each.machine) for step, each in zip(steps, done, strict=True))
        return round(statistics.median(values), digits)

    def line(step: StepBreakdown, name: str) -> StepPart:
        return next(each for each in step.lines if each.name == name)

    names = [each.name for each in steps[0].lines if each.name not in {WHOLE, *HOST}]
    return {
        "model": shape,
        "weights": DTYPES[quantization],
        "rows": steps[0].rows,
        "steady_rounds": len(done),
        "step_times_roofline": median(lambda s, m: times_roofline(line(s, WHOLE), m), 3),
        "step_times_its_ops": median(times_ops, 3),
        "experts_times_roofline": median(lambda s, m: times_roofline(line(s, "experts"), m), 3),
        "experts_gb_s": median(lambda s, m: line(s, "experts").gb_s or 0.0, 2),
        "machine_gb_s": median(lambda s, m: m.bandwidth / 1e9, 2),
        "machine_best_gb_s": round(max(each.best for each in done) / 1e9, 2),
        "step_us": median(lambda s, m: s.us, 1),
        "host_us": median(lambda s, m: s.host_us, 1),
        "ops_us": {name: median(lambda s, m, n=name: line(s, n).us, 1) for name in names},  # type: ignore[misc]
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", default=f"{MAIN},{SMALL}", help="shapes of make_model.py")
    arguments.add_argument(
        "--models", type=Path, help="folder for the checkpoints, which are kept (default: a temporary folder)"
    )
    arguments.add_argument("--rows", default="1,8")
    arguments.add_argument("--quantization", default="none,int8")
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--steps", type=int, default=3, help="steps of each number of rows in a round")
    args = arguments.parse_args()
    rows, cpus = [int(each) for each in args.rows.split(",")], os.sched_getaffinity(0)
    shapes = args.shape.split(",")
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for shape in shapes:
            folder = write_model((args.models or Path(scratch)) / shape, shape)
            for quantization in args.quantization.split(","):
                done = rounds(folder, quantization, rows, args.rounds, args.steps, cpus)
                cases += [figures(shape, quantization, index, done) for index in range(len(rows))]
    models = {shape: {name: SHAPES[shape][name] for name in SIZES} for shape in shapes}
    how = {"context": CONTEXT, "rounds": args.rounds, "steps": args.steps}
    write({"benchmark": "moe", "models": models, **how, "cases": cases}, args.json)


if __name__ == "__main__":
    main()
