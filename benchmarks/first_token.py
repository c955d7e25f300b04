"""Measures the time from the command `penstock run PROMPT` to the first byte of the answer, with the default model.

python benchmarks/first_token.py [--before FOLDER] --json benchmarks/results/avx512/first_token.json

FOLDER is a work tree of another commit, which runs in turn with this one.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from results import commit_of, parser, write

PROMPT = "What is the capital of France?"
HERE = Path(__file__).resolve().parent.parent


def first_byte(tree: Path) -> float:
    """Seconds. Waits for the end of the answer."""
    command = [sys.executable, "-P", "-m", "penstock", "run", PROMPT]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        first = run.stdout.read(1)
        seconds = time.perf_counter() - began
        run.stdout.read()
        if not first or run.wait():
            raise RuntimeError(f"no answer: {run.stderr.read().decode(errors='replace')}")
    return round(seconds, 2)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=9)
    arguments.add_argument("--before", type=Path, metavar="FOLDER")
    args = arguments.parse_args()
    trees = [HERE, *([args.before] if args.before else [])]
    seconds: dict[Path, list[float]] = {tree: [] for tree in trees}
    for tree in trees:
        first_byte(tree)  # a warm-up, as files may not be in the page cache
    for _ in range(args.runs):
        for tree, each in seconds.items():
            each.append(first_byte(tree))
    figures = {
        commit_of(tree): {"seconds": each, "median_s": statistics.median(each)} for tree, each in seconds.items()
    }
    write({"benchmark": "first_token", "prompt": PROMPT, "by_commit": figures}, args.json)


if __name__ == "__main__":
    main()
