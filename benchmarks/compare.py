"""Compares Penstock with other servers on the same cases, in turn: median rates, and ratios to the best peer.

A peer is a name, a version and a command. The command takes `--cases` and prints a JSON line for each case with "case"
and "elapsed_s". Penstock may run several times, with flags of `penstock bench throughput`:

    python benchmarks/compare.py MODEL_DIR --runs 3 --json benchmarks/results/compare.json \\
        --ours "bf16=" --ours "int8=--quantization int8 --kv-cache-dtype int8" \\
        --peer "vllm 0.32.0=/path/to/python vllm_cpu_bench.py MODEL_DIR"

The rate of a case counts output tokens. A case with one output token is a prefill: its rate counts prompt tokens.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from results import parser, write

Row = dict[str, Any]


def bench_throughput(model: str, flags: str, cases: str, runs: int = 1) -> list[Row]:
    """The rows of `penstock bench throughput`, one for each case: the median of `runs` runs."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "penstock", "bench", "throughput", model, *shlex.split(flags)]
        subprocess.run(
            [*command, "--cases", cases, "--runs", str(runs), "--json", file.name], check=True, stdout=sys.stderr
        )
        rows: list[Row] = json.loads(Path(file.name).read_text())
        return rows


def peer(command: str, cases: str) -> list[Row]:
    """The rows of one run of a peer's command. Lines that are not JSON are ignored."""
    done = subprocess.run([*shlex.split(command), "--cases", cases], check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tokens_counted(case: str) -> int:
    """The tokens that a case's rate counts: output tokens, or the prompts' tokens if each has one output token."""
    count, _, lengths = case.partition("x")
    prompt, _, output = lengths.partition("/")
    return int(count) * int(prompt if output == "1" else output)


def medians_of(runs: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """The median of each engine's runs of each case."""
    return {name: {case: statistics.median(values) for case, values in by.items()} for name, by in runs.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model")
    arguments.add_argument("--ours", action="append", metavar="NAME=FLAGS", help="flags of the engine; may be repeated")
    arguments.add_argument(
        "--peer", action="append", default=[], metavar="NAME VERSION=COMMAND", help="may be repeated"
    )
    arguments.add_argument("--cases", default="1x256/64,8x256/64,32x256/128,1x1024/1")
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args()
    engines: dict[str, Callable[[], list[Row]]] = {}
    mine, versions = [], dict[str, str]()
    for text in args.ours or ["penstock="]:
        name, _, flags = text.partition("=")
        mine.append(name)
        engines[name] = partial(bench_throughput, args.model, flags, args.cases)
    for text in args.peer:
        label, _, command = text.partition("=")
        name, _, versions[name] = label.partition(" ")
        if not versions[name] or not command:
            arguments.error(f"--peer {text!r} is not NAME VERSION=COMMAND")
        engines[name] = partial(peer, command, args.cases)
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    # Share of the roofline, and of the roofline with torch's GEMM, for each run.
    fractions: dict[str, dict[str, dict[str, list[float]]]] = {
        key: {name: {} for name in mine} for key in ("roofline_fraction", "gemm_roofline_fraction")
    }
    details: dict[str, dict[str, Row]] = {name: {} for name in mine}
    for run in range(args.runs):
        for name, measure in engines.items():
            for row in measure():
                case = str(row["case"])
                rates[name].setdefault(case, []).append(round(tokens_counted(case) / float(row["elapsed_s"]), 2))
                print(f"run {run + 1}: {name} {case}: {rates[name][case][-1]} tok/s", file=sys.stderr, flush=True)
                if name in mine:
                    details[name][case] = row
                    for key, by_name in fractions.items():
                        by_name[name].setdefault(case, []).append(float(row[key]))
    medians = medians_of(rates)
    best = {
        case: max((by[case] for name, by in medians.items() if name not in mine and case in by), default=None)
        for case in args.cases.split(",")
    }
    over_best = {
        name: {case: round(value / top, 2) for case, value in medians[name].items() if (top := best.get(case))}
        for name in mine
    }
    result = {"benchmark": "compare", "tok_s": medians, "runs": rates, "over_best_peer": over_best}
    shares = {key: medians_of(by_name) for key, by_name in fractions.items()}
    write({**result, **shares, "last_run": details}, args.json, peers=versions)


if __name__ == "__main__":
    main()
