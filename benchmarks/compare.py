"""Penstock and its peers on the same work, in turns, in one run: medians and their ratios.

A peer is a command that takes `--cases` and prints a JSON line for each case with "case" and "output_tok_s":

    python benchmarks/compare.py MODEL_DIR --peer "vllm=/path/to/python vllm_cpu_bench.py MODEL_DIR" --runs 3 \\
        --json benchmarks/results/compare.json
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import parser, write


def ours(model: str, cases: str) -> list[dict[str, object]]:
    """One run of `penstock bench throughput`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "penstock.cli.main", "bench", "throughput", model]
        subprocess.run([*command, "--cases", cases, "--runs", "1", "--json", file.name], check=True, stdout=sys.stderr)
        rows: list[dict[str, object]] = json.loads(Path(file.name).read_text())
        return rows


def peer(command: str, cases: str) -> list[dict[str, object]]:
    """One run of a peer's command; whatever else it prints is passed over."""
    done = subprocess.run([*shlex.split(command), "--cases", cases], check=True, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model")
    arguments.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    arguments.add_argument("--cases", default="1x256/64,8x256/64,32x256/128")
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args()
    engines = {"penstock": lambda: ours(args.model, args.cases)}
    for text in args.peer:
        name, _, command = text.partition("=")
        engines[name] = lambda command=command: peer(command, args.cases)
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    details: dict[str, dict[str, object]] = {}
    for run in range(args.runs):
        for name, measure in engines.items():
            for row in measure():
                rates[name].setdefault(str(row["case"]), []).append(float(str(row["output_tok_s"])))
                print(f"run {run + 1}: {name} {row['case']}: {row['output_tok_s']} tok/s", file=sys.stderr, flush=True)
                if name == "penstock":
                    details[str(row["case"])] = row
    medians = {name: {case: statistics.median(values) for case, values in by.items()} for name, by in rates.items()}
    ratios = {
        name: {case: round(medians["penstock"][case] / value, 3) for case, value in by.items() if value}
        for name, by in medians.items()
        if name != "penstock"
    }
    result = {"benchmark": "compare", "output_tok_s": medians, "runs": rates, "penstock_over_peer": ratios}
    write({**result, "penstock_last_run": details}, args.json)


if __name__ == "__main__":
    main()
