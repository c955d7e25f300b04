"""Counts the processor instructions of a prompt and of a decode step in two source trees: of the kernels, and of all.

    git worktree add ../before COMMIT && PYTHONPATH=../before/src python ../before/src/penstock/kernels/native/build.py
    python benchmarks/instructions.py ../before/src src --model MODEL_DIR --variant "bf16=" \\
        --variant "int8=--quantization int8 --kv-cache-dtype int8"

Callgrind (`apt install valgrind`) counts every instruction, so the figures hardly vary and do not depend on other
programs. Valgrind has no AVX512, so the kernels are those of AVX2. Each tree runs the library's engine on one thread.
Those of libpenstock.so count, and as `whole` those of the process, with Python's interpreter; benchmarks/bytecodes.py
counts what Python executes. "decode, N sequences" is per step: one prompt is sent for N choices with two limits of
tokens, and the difference of the counts is divided by that of the limits. (N prompts do not always begin in the same
step, which changes the figure by up to 4%.) `same_tokens`: whether both trees generated the same.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from before_after import parse_flags
from results import commit_of, parser, write

PROMPT = 256  # tokens of the prompt that is counted
CONTEXT = 16  # tokens of the prompt before the decode steps that are counted
SEQUENCES = (1, 8)  # of these decode steps
FEW, MANY = 4, 12  # output tokens of the two runs whose difference is counted
LIBRARY = "libpenstock.so"
Counts = tuple[int, int]  # instructions of the library, and of the whole process


def cases() -> Iterator[tuple[str, int, int, int]]:
    """Yields (name, sequences, tokens of each prompt, output tokens) of every run."""
    yield "prompt", 1, PROMPT, 1
    for count in SEQUENCES:
        yield f"few {count}", count, CONTEXT, FEW
        yield f"many {count}", count, CONTEXT, MANY


# -- in the process that is measured, under valgrind ------------------------------------------------------------------


def run_engine(model: str, settings: dict[str, Any]) -> None:
    """Runs every case after a warm-up, and has callgrind write a file of counts for each. Prints the tokens as JSON."""
    from penstock import LLM, SamplingParams

    def control(*order: str) -> None:
        subprocess.run(["callgrind_control", *order, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)

    llm = LLM(model, threads=1, speculation="off", enable_prefix_caching=False, max_num_seqs=8, **settings)
    tokens: dict[str, list[Any]] = {}
    for name, count, length, output in (("warm-up", 1, CONTEXT, FEW), *cases()):
        prompt = [100 + place for place in range(length)]
        params = SamplingParams(n=count, max_tokens=output, temperature=0.0, ignore_eos=True)
        control("-z")  # the counts begin with 0
        if name != "warm-up":
            control("-i", "on")
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
        if name != "warm-up":
            control("-i", "off")
            control(f"--dump={name}")
        tokens[name] = [list(output.token_ids) for output in answer.outputs]
    print(json.dumps(tokens))
    llm.close()


# -- in the process that compares --------------------------------------------------------------------------------------


def instructions(counts: Path) -> Counts:
    """Returns the instructions of the library and of the whole process in a file of callgrind."""
    library, whole, inside, of_call = 0, 0, False, False
    for line in counts.read_text().splitlines():
        if line.startswith("ob="):
            inside = line.endswith(LIBRARY)
        elif line.startswith("calls="):
            of_call = True  # the next line has the instructions of the function that is called
        elif line[:1].isdigit() or line[:1] in ("+", "-", "*"):
            count = 0 if of_call else int(line.split()[1])
            library, whole = library + count * inside, whole + count
            of_call = False
    return library, whole


def measure(source: Path, model: str, flags: dict[str, str]) -> tuple[dict[str, Counts], dict[str, Any]]:
    """Returns the instructions of each case in one tree, and the tokens of each run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--compress-strings=no", "--compress-pos=no"]
        own = [sys.executable, __file__, "--engine", model, json.dumps(flags)]
        environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "PENSTOCK_ISA": "avx2"}
        command = [*valgrind, f"--callgrind-out-file={out}", *own]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{source}: callgrind ended with status {done.returncode}: {done.stderr[-2000:]}")
        counted: dict[str, Counts] = {}
        for file in Path(folder).glob("counts*"):
            name = file.read_text().partition("desc: Trigger: ")[2].partition("\n")[0]
            for case, *_ in cases():
                if name.endswith(case):
                    counted[case] = instructions(file)
        found = {f"prompt of {PROMPT} tokens": counted["prompt"]}
        for count in SEQUENCES:
            many, few = counted[f"many {count}"], counted[f"few {count}"]
            library, whole = (round((more - less) / (MANY - FEW)) for more, less in zip(many, few, strict=True))
            found[f"decode, {count} sequence{'s' * (count > 1)}"] = library, whole
        return found, json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        run_engine(sys.argv[2], json.loads(sys.argv[3]))
        return
    arguments = parser(__doc__)
    arguments.add_argument("old", type=Path, help="the src folder of the tree before, with its native library")
    arguments.add_argument("new", type=Path)
    arguments.add_argument("--model", required=True, help="a checkpoint's folder")
    arguments.add_argument("--variant", action="append", metavar="NAME=FLAGS", help="settings; may be repeated")
    args: argparse.Namespace = arguments.parse_args()
    if shutil.which("valgrind") is None:
        arguments.error("valgrind is not installed: apt install valgrind")
    rows = []
    for variant in args.variant or ["default="]:
        name, _, text = variant.partition("=")
        (old, old_tokens), (new, new_tokens) = (
            measure(source, args.model, parse_flags(text)) for source in (args.old, args.new)
        )
        for case, (old_library, old_whole) in old.items():
            library, whole = new[case]
            figures = {"old": old_library, "new": library, "ratio": round(library / old_library, 4)}
            figures |= {"old_whole": old_whole, "new_whole": whole, "ratio_whole": round(whole / old_whole, 4)}
            rows.append({"variant": name, "case": case, **figures, "same_tokens": old_tokens == new_tokens})
            print(f"{name} {case}: {figures}", file=sys.stderr, flush=True)
    commits = {"old": commit_of(args.old), "new": commit_of(args.new)}
    write({"benchmark": "instructions", "trees": commits, "model": Path(args.model).name, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
