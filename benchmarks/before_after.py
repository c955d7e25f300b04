"""Compares the speed of two source trees of Penstock on one machine, in runs that alternate.

    python benchmarks/before_after.py ../before/src src MODEL_DIR --pairs 10 \\
        --cases 1x256/64,8x256/64,32x256/128 --variant "bf16=" \\
        --variant "int8=--quantization int8 --kv-cache-dtype int8" --json benchmarks/results/avx512/before_after.json

For each variant both trees load the model once, each in a process of its own. Then the runs of a case go old, new, new,
old, and so on. A pair is one run of each tree on the same prompts; its ratio is new over old tokens per second. The
figures are the median ratio with its 95% interval (order statistics of the sign test: no assumption on the
distribution) and the median host time of a step. While one tree runs, the other is idle; `idle_cpu` is the share of one
core that it used nevertheless, at most. `same_tokens` compares the first tokens of each case between the trees.

With --new-model and the same tree twice it compares two forms of a model, such as a GPTQ checkpoint with the model that
--quantization int4 quantises: --variant "int4=--quantization int4 --quantization-group 128" quantises only floats.

Of a model for embeddings give --pooled and cases with one output token, such as 64x100/1: the rate is the prompts'.
"""

import argparse
import asyncio
import hashlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from results import commit_of, parser, save, tokens_counted, write

OLD, NEW = "old", "new"
PAUSE = 0.1  # seconds before a run: the other tree's native threads spin for about 1 ms after a step, then sleep
COVERAGE = 0.95
WARM_UP_TOKENS = 16  # output tokens of each request in the warm-up


class Run(NamedTuple):
    rate: float  # tokens per second: output tokens, or the prompts' if there is one output token each
    host_us: float  # per step


class Tree:
    """A process that holds one tree's engine with the model loaded, and runs one case at a time."""

    def __init__(self, name: str, source: Path, settings: dict[str, Any]) -> None:
        """Starts the process, which gets `settings` (`run_engine`); `wait_until_ready` must follow."""
        self.name, self.idle_cpu, self._source = name, 0.0, source
        self.tokens: dict[str, str] = {}  # by case: a digest of the tokens of the warm-up
        paths = [str(source), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", json.dumps(settings)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Returns once the engine is warm. RuntimeError if it failed or imported another tree."""
        answer = self._answer()
        imported, self.tokens = Path(answer["penstock"]), answer["tokens"]
        if self._source not in imported.parents:
            raise RuntimeError(f"the {self.name} tree is {self._source}, but penstock came from {imported}")

    def run(self, case: str, seed: int) -> Run:
        """One run of a case. RuntimeError if a request failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"case": case, "seed": seed}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Run(tokens_counted(case) / answer["elapsed"], answer["host_us"])

    def close(self) -> None:
        """Ends the process, and its engine with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the process leaves its loop
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cpu_seconds(self) -> float:
        """CPU time that the process and its engine have used so far."""
        family, seconds = [self._process.pid], 0.0
        for pid in family:
            for task in Path(f"/proc/{pid}/task").iterdir():
                family += map(int, (task / "children").read_text().split())
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended: see above"}
        if "error" in answer:
            raise RuntimeError(f"the {self.name} tree failed: {answer['error']}")
        return answer


# -- in the process of a tree: only names that both trees have ------------------------------------------------------


class RecordingClient:
    """Passes requests on to an engine client and records their tokens. `pooling`: each asks for a vector instead."""

    def __init__(self, client: Any, pooling: Any = None) -> None:
        self._client, self._pooling = client, pooling
        self._tokens: dict[str, list[int]] = {}  # by request; the bytes of vectors

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        if self._pooling is not None:
            request = msgspec.structs.replace(request, pooling=self._pooling)
        async for delta in self._client.generate(request):
            self._tokens.setdefault(request.request_id, []).extend([*delta.token_ids, *delta.pooled])
            yield delta

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self._tokens, sort_keys=True).encode()).hexdigest()[:16]


async def run_engine(settings: dict[str, Any], answers: Any) -> None:
    """Loads the model, then runs the cases that standard input names; writes a line of JSON for each to `answers`.

    `settings`: the `model`, its `flags`, all `cases`, and whether requests are `pooled`: ask for vectors."""
    import penstock.messages
    from penstock.bench.offline import host_us_per_step, run_items, settled
    from penstock.bench.workload import Case, fixed, parse_cases
    from penstock.config.settings import Settings

    try:
        from penstock.prepare.engine import own_engine
        from penstock.prepare.model import prepare
    except ModuleNotFoundError:  # an older tree
        from penstock.cli.engine import own_engine
        from penstock.cli.prepare import prepare

    cases = {text: parse_cases(text)[0] for text in settings["cases"]}
    longest = max(case.prompt_len + case.output_len for case in cases.values())
    sequences = max(case.count for case in cases.values())
    fixed_settings: dict[str, Any] = {"max_model_len": longest + 16, "max_num_seqs": max(32, sequences)}
    if "speculation" in Settings.model_fields:  # a tree without it must not be compared with drafts
        fixed_settings["speculation"] = "off"
    engine = prepare(
        settings["model"], {**fixed_settings, **settings["flags"]}, pools=settings["pooled"]
    ).resolved.engine
    async with own_engine(engine) as client:
        pooling = penstock.messages.PoolingParams() if settings["pooled"] else None
        reset = penstock.messages.ResetCache() if hasattr(penstock.messages, "ResetCache") else "reset_prefix_cache"

        async def timed(case: Any, seed: int) -> dict[str, Any]:
            await client.control(reset)
            before = await settled(client)
            asking = client if pooling is None else RecordingClient(client, pooling)
            lines, elapsed = await run_items(asking, fixed(case, client.info.vocab_size, seed), f"{case}-{seed}")
            if errors := [line.error for line in lines if line.error]:
                return {"error": errors[0]}
            return {"elapsed": elapsed, "host_us": host_us_per_step(before, await settled(client))}

        leave_processor(client.info.cpu)
        digests = {}
        for name, case in cases.items():  # a warm-up
            short = Case(case.count, case.prompt_len, min(case.output_len, WARM_UP_TOKENS))
            recording: Any = RecordingClient(client, pooling)
            await run_items(recording, fixed(short, client.info.vocab_size), name)
            digests[name] = recording.digest()
        print(json.dumps({"penstock": penstock.__file__, "tokens": digests}), file=answers, flush=True)
        orders = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        async for line in orders:
            order = json.loads(line)
            print(json.dumps(await timed(cases[order["case"]], order["seed"] + 1)), file=answers, flush=True)


def leave_processor(cpu: int | None) -> None:
    """Keeps this process off the processor on which the engine's loop runs, as `penstock bench throughput` does."""
    for thread in Path("/proc/self/task").iterdir():
        allowed = os.sched_getaffinity(int(thread.name))
        os.sched_setaffinity(int(thread.name), allowed - {cpu} or allowed)


# -- in the process that compares -----------------------------------------------------------------------------------


def interval(values: list[float]) -> tuple[float, float, float]:
    """(low, high, coverage) for the median of `values`: the narrowest symmetric pair of order statistics that covers
    the median with a probability of at least 95%. Fewer than six values cannot: then the extremes, and what they cover.
    """
    ordered, count = sorted(values), len(values)
    below = [sum(math.comb(count, j) for j in range(k + 1)) / 2**count for k in range(count)]  # P(k or fewer are lower)
    left_out = max((k for k in range(1, count // 2 + 1) if 2 * below[k - 1] <= 1 - COVERAGE), default=1) - 1
    return ordered[left_out], ordered[-1 - left_out], round(1 - 2 * below[left_out], 4)


def summary(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """The figures of one case."""
    ratios = [new.rate / old.rate for old, new in zip(runs[OLD], runs[NEW], strict=True)]
    low, high, coverage = interval(ratios)
    return {
        "pairs": len(ratios),
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "coverage": coverage,
        "tok_s": {name: round(statistics.median(run.rate for run in each), 2) for name, each in runs.items()},
        "host_us_per_step": {
            name: round(statistics.median(run.host_us for run in each), 1) for name, each in runs.items()
        },
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def run_pair(trees: list[Tree], case: str, pair: int) -> dict[str, Run]:
    """One run of each tree, the order changing from pair to pair; the tree that is idle is checked to be so."""
    done = {}
    order = trees if pair % 2 == 0 else trees[::-1]
    for tree, idle in zip(order, order[::-1], strict=True):
        time.sleep(PAUSE)
        used, began = idle.cpu_seconds(), time.perf_counter()
        done[tree.name] = tree.run(case, pair)
        idle.idle_cpu = max(idle.idle_cpu, (idle.cpu_seconds() - used) / (time.perf_counter() - began))
    return done


def compare_variant(args: argparse.Namespace, name: str, flags: dict[str, str]) -> dict[str, Any]:
    """Figures of each case with one variant's settings."""
    cases = args.cases.split(",")
    trees: list[Tree] = []
    runs: dict[str, dict[str, list[Run]]] = {case: {OLD: [], NEW: []} for case in cases}
    try:
        for label, source, model in ((OLD, args.old, args.model), (NEW, args.new, args.new_model or args.model)):
            settings = {"model": model, "cases": cases, "flags": flags, "pooled": args.pooled}
            trees.append(Tree(label, source.resolve(), settings))
            trees[-1].wait_until_ready()  # one after the other: each sizes itself by the memory that is free
        for pair in range(args.pairs):
            for case in cases:
                done = run_pair(trees, case, pair)
                for label, run in done.items():
                    runs[case][label].append(run)
                so_far = summary(runs[case])
                print(
                    f"{name} {case}, pair {pair + 1} of {args.pairs}: {done[OLD].rate:.2f} and {done[NEW].rate:.2f} "
                    f"tok/s, host {done[OLD].host_us:.0f} and {done[NEW].host_us:.0f} µs/step; median ratio "
                    f"{so_far['ratio']:.3f} in {so_far['interval'][0]:.3f} to {so_far['interval'][1]:.3f}",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        for tree in trees:
            tree.close()
    figures = {case: summary(each) for case, each in runs.items()}
    same = {case: trees[0].tokens[case] == trees[1].tokens[case] for case in cases}
    idle_cpu = {tree.name: round(tree.idle_cpu, 4) for tree in trees}
    return {"flags": flags, "same_tokens": same, "idle_cpu": idle_cpu, "cases": figures}


def parse_flags(text: str) -> dict[str, str]:
    """ "--quantization int8 --kv-cache-dtype int8" as settings by name. ValueError if a flag has no value."""
    words = shlex.split(text)
    flags = dict(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or not all(flag.startswith("--") for flag in flags):
        raise ValueError(f"--variant: {text!r} is not a list of flags with values, such as --quantization int8")
    return {flag[2:].replace("-", "_"): value for flag, value in flags.items()}


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever else is printed goes to the terminal
        asyncio.run(run_engine(json.loads(sys.argv[2]), answers))
        return
    arguments = parser(__doc__)
    arguments.add_argument("old", type=Path, help="the src folder of the tree before")
    arguments.add_argument("new", type=Path, help="the src folder of the tree after")
    arguments.add_argument("model", help="a checkpoint's folder")
    arguments.add_argument("--new-model", help="the folder that the tree after serves, if it is another one")
    arguments.add_argument("--pooled", action="store_true", help="the model is one for embeddings")
    arguments.add_argument("--cases", default="1x256/64,8x256/64,32x256/128", help="NxIN/OUT, comma-separated")
    arguments.add_argument("--variant", action="append", metavar="NAME=FLAGS", help="settings; may be repeated")
    arguments.add_argument("--pairs", type=int, default=10, help="pairs of runs of each case; 6 give a 95%% interval")
    args = arguments.parse_args()
    variants = {
        name: parse_flags(flags) for name, _, flags in (text.partition("=") for text in args.variant or ["default="])
    }
    trees = {OLD: commit_of(args.old), NEW: commit_of(args.new)}
    found: dict[str, Any] = {}
    result: dict[str, Any] = {
        "benchmark": "before_after",
        "trees": trees,
        "model": Path(args.model).name,
        "variants": found,
    }
    if args.new_model:
        result["new_model"] = Path(args.new_model).name
    for name, flags in variants.items():
        found[name] = compare_variant(args, name, flags)
        save(result, args.json)  # a later failure does not lose these figures
    for name, variant in found.items():
        for case, each in variant["cases"].items():
            low, high = each["interval"]
            tokens = "" if variant["same_tokens"][case] else ", tokens differ"
            print(f"{name} {case}: {each['ratio']:.3f} ({low:.3f} to {high:.3f}){tokens}", file=sys.stderr)
    write(result, args.json)


if __name__ == "__main__":
    main()
