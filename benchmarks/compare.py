"""Compares Penstock with other servers on the same cases, in turn: median rates, and ratios to the best peer.

A peer is a name, a version and a command. The command takes `--cases` and prints a JSON line for each case with "case",
"elapsed_s" and "began", a time of `time.perf_counter`. Penstock may run several times, with flags of `penstock bench
throughput`:

    python benchmarks/compare.py MODEL_DIR --runs 3 --json benchmarks/results/avx512/compare.json \\
        --ours "bf16=" --ours "int8=--quantization int8 --kv-cache-dtype int8" \\
        --peer "vllm 0.32.0=/path/to/python vllm_cpu_bench.py MODEL_DIR"

Flags of --ours may begin with another model, such as one that is quantised: "gptq=../model-gptq --quantization int8".

The same GGUF file in both engines:

    python benchmarks/compare.py MODEL.gguf \\
        --peer "llama.cpp 0.3.36=/path/to/python benchmarks/peers/llama_cpp_bench.py MODEL.gguf"

A peer may also print "bits_per_weight" and "peak_memory_bytes". The latter is the peak resident memory of its process.
Prompts are random and runs start with an empty prefix cache, so that nothing is found there.

If the processor was calm in no run of a case (see calm.py), the engine runs it once more at the end, unless it was calm
in no run of any case. A median is of the calm runs; without any it is of all runs, and marked.

The rate of a case counts output tokens. A case with one output token is a prefill: its rate counts prompt tokens.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from calm import SHARE, Watch
from results import parser, save, tokens_counted

from penstock.cli.output import show_table
from penstock.config import format_bytes
from penstock.families import load_spec, model_facts

Row = dict[str, Any]
Engine = Callable[[str], list[Row]]  # runs cases, such as "1x256/64,8x256/64"
DISTURBED = "§"


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


def run_in_turn(
    engines: Mapping[str, Engine], cases: str, runs: int, share: Callable[[float, float], float | None]
) -> dict[str, dict[str, list[Row]]]:
    """The rows of each engine and case. Engines take turns. Each row gets its "rate", in tokens per second, and its
    "calm_share". A case without a calm run is run once more, unless no run of any case was calm."""
    found: dict[str, dict[str, list[Row]]] = {name: {} for name in engines}
    for run in range(runs + 1):
        if run == runs and not any(calm(rows) for cases_of in found.values() for rows in cases_of.values()):
            break
        for name, measure in engines.items():
            again = [case for case, rows in found[name].items() if calm(rows) is False]
            now = cases if run < runs else ",".join(again)
            for row in measure(now) if now else ():
                case, seconds = str(row["case"]), float(row["elapsed_s"])
                rate = round(tokens_counted(case) / seconds, 2)
                calm_share = share(row["began"], row["began"] + seconds) if "began" in row else None
                found[name].setdefault(case, []).append({**row, "rate": rate, "calm_share": calm_share})
                print(f"run {run + 1}: {name} {case}: {rate} tok/s, calm: {calm_share}", file=sys.stderr, flush=True)
    return found


def calm(rows: Sequence[Row]) -> bool | None:
    """True if the processor was calm during one of the runs, None if that is unknown."""
    shares = [row["calm_share"] for row in rows if row["calm_share"] is not None]
    return max(shares) >= SHARE if shares else None


def calm_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """The runs with a calm processor; all if there is none."""
    return [row for row in rows if (row["calm_share"] or 0) >= SHARE] or rows


def listed(rows: Mapping[str, Mapping[str, Sequence[Row]]], key: str) -> dict[str, dict[str, list[Any]]]:
    """One figure of every run, for each engine and case."""
    return {
        name: {case: [row[key] for row in each] for case, each in by_case.items()} for name, by_case in rows.items()
    }


def medians_of(rows: Mapping[str, Mapping[str, Sequence[Row]]], key: str) -> dict[str, dict[str, float]]:
    """The median of one figure, for each engine and case."""
    return {
        name: {case: round(statistics.median(map(float, each)), 4) for case, each in by_case.items()}
        for name, by_case in listed(rows, key).items()
    }


def over_best_peer(
    medians: Mapping[str, Mapping[str, float]], mine: Sequence[str], cases: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Our rates over the highest of a peer's, for each of our engines and each case that a peer ran. Peers whose name
    ends with ours, such as OpenVINO-int8 and int8, are of the same precision: then only they count."""
    ratios: dict[str, dict[str, float]] = {}
    others = [name for name in medians if name not in mine]
    for name in mine:
        peers = [peer for peer in others if peer.endswith(f"-{name}")] or others
        best = {case: max((medians[peer].get(case, 0) for peer in peers), default=0) for case in cases}
        ratios[name] = {case: round(rate / best[case], 2) for case, rate in medians[name].items() if best.get(case)}
    return ratios


def sizes_of(rows: Mapping[str, Mapping[str, Sequence[Row]]], parameters: int) -> dict[str, Row]:
    """The bits of a weight and the peak memory of each engine, None if it does not report them."""
    sizes = {}
    for name, by_case in rows.items():
        every = [row for each in by_case.values() for row in each]
        bits = {row.get("bits_per_weight") or _bits(row.get("weights_bytes"), parameters) for row in every}
        memory = [row["peak_memory_bytes"] for row in every if row.get("peak_memory_bytes")]
        sizes[name] = {
            "bits_per_weight": max((each for each in bits if each), default=None),
            "peak_memory_bytes": max(memory, default=None),
        }
    return sizes


def show(result: Row, cases: Sequence[str]) -> None:
    """Prints each engine's rates, sizes, and its ratios to the best peer."""
    columns = [("engine", "engine"), ("bits/weight", "bits"), ("memory", "memory"), *((case, case) for case in cases)]
    rows = []
    for name, rates in result["tok_s"].items():
        size = result["sizes"][name]
        memory = size["peak_memory_bytes"]
        sizes = {"bits": size["bits_per_weight"], "memory": None if memory is None else format_bytes(memory)}
        marks = {case: f" {DISTURBED}" if result["calm"][name][case] is False else "" for case in rates}
        rows.append({"engine": name, **sizes, **{case: f"{rate:,.1f}{marks[case]}" for case, rate in rates.items()}})
        if ratios := result["over_best_peer"].get(name):
            rows.append({"engine": "  / best peer", "bits": "", "memory": "", **ratios})
    show_table(f"tokens per second, medians; {DISTURBED}: the processor was not calm", columns, rows)


def _bits(weights_bytes: int | None, parameters: int) -> float | None:
    return None if weights_bytes is None else round(weights_bytes * 8 / parameters, 3)


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
    engines: dict[str, Engine] = {}
    mine, versions = [], dict[str, str]()
    for text in args.ours or ["penstock="]:
        name, _, flags = text.partition("=")
        mine.append(name)
        first, _, rest = flags.partition(" ")
        other = first and not first.startswith("-")
        engines[name] = partial(bench_throughput, *((first, rest) if other else (args.model, flags)))
    for text in args.peer:
        label, _, command = text.partition("=")
        name, _, versions[name] = label.partition(" ")
        if not versions[name] or not command:
            arguments.error(f"--peer {text!r} is not NAME VERSION=COMMAND")
        engines[name] = partial(peer, command)
    parameters = model_facts(load_spec(Path(args.model))).num_parameters
    cases = args.cases.split(",")
    every = run_in_turn(engines, args.cases, args.runs, Watch().share)
    rows = {name: {case: calm_rows(each) for case, each in by_case.items()} for name, by_case in every.items()}
    ours = {name: rows[name] for name in mine}
    medians = medians_of(rows, "rate")
    result = {
        "benchmark": "compare",
        "tok_s": medians,
        "calm": {name: {case: calm(each) for case, each in by_case.items()} for name, by_case in every.items()},
        "runs": listed(every, "rate"),
        "calm_shares": listed(every, "calm_share"),
        "over_best_peer": over_best_peer(medians, mine, cases),
        "sizes": sizes_of(rows, parameters),
        # Shares of the roofline, and of the roofline with torch's GEMM.
        **{key: medians_of(ours, key) for key in ("roofline_fraction", "gemm_roofline_fraction")},
        "last_run": {name: {case: each[-1] for case, each in by.items()} for name, by in ours.items()},
    }
    show(result, cases)
    save(result, args.json, peers=versions)


if __name__ == "__main__":
    main()
