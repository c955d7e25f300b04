"""The cases of compare.py, for the scripts that run them in another engine: N requests of IN random prompt tokens, OUT
greedy output tokens each."""

import argparse
import json
import time
from collections.abc import Callable

Case = tuple[int, int, int]  # requests, prompt tokens, output tokens

WARM_UP: Case = (1, 32, 8)


def parse() -> tuple[str, list[Case]]:
    """The model and the cases of the command line: MODEL --cases 1x256/64,8x256/64."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--cases", default="1x256/64,8x256/64,32x256/128,1x1024/1")
    args = parser.parse_args()
    cases = []
    for case in args.cases.split(","):
        count, _, lengths = case.partition("x")
        prompt, _, output = lengths.partition("/")
        cases.append((int(count), int(prompt), int(output)))
    return args.model, cases


def report(cases: list[Case], run: Callable[[int, int, int], int]) -> None:
    """Runs each case after a warm-up and prints a JSON line for it. `run` returns how many tokens were put out."""
    run(*WARM_UP)
    for count, prompt, output in cases:
        start = time.perf_counter()
        produced = run(count, prompt, output)
        elapsed = time.perf_counter() - start
        if produced != count * output:
            raise SystemExit(f"{count}x{prompt}/{output}: {produced} output tokens instead of {count * output}")
        row = {"case": f"{count}x{prompt}/{output}", "began": start, "elapsed_s": round(elapsed, 3)}
        print(json.dumps(row), flush=True)
