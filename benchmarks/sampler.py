"""Measures the milliseconds to sample a batch of rows, with native kernels and NumPy, and to read the logits.

    python benchmarks/sampler.py [--vocab 151936] [--rows 32] [--steps 15] [--threads 2] [--json FILE]

There are two kinds of logits. `zipf` falls with the rank as a language model's logits do (1.5 ln rank, with noise).
`flat` is normal with a deviation of 1, as random weights give, and top_p 0.9 keeps more than half of the vocabulary.

Times are wall times: the least, as other processes only add to it, and the median. `read_ms` is a maximum over the
logits in NumPy on one thread, which is the roofline. `python_us` is sampling with a vocabulary of 32: the calls.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from results import parser, write

from penstock.kernels.batch_arrays import LOGIT_LINES, ROW
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from penstock.messages import SamplingParams
from penstock.runtime.native_step import NativeStep
from penstock.runtime.sampling.sampler import Sampler
from penstock.runtime.step_kernels import ReferenceStep, StepKernels

CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_k 1000": {"top_k": 1000},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.5": {"top_p": 0.5},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "penalties, greedy": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "logprobs 5, greedy": {"temperature": 0.0, "logprobs": 5},
    "logprobs 20, top_p 0.9": {"top_p": 0.9, "logprobs": 20},
}


def make_logits(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((rows, vocab), np.float32)
    if kind == "zipf":
        ranks = np.stack([random.permutation(vocab) for _ in range(rows)]) + 1
        logits = (-1.5 * np.log(ranks) + 0.5 * logits).astype(np.float32)
    return torch.from_numpy(logits)


def step_times(step: Callable[[], object], steps: int) -> list[float]:
    """Milliseconds of each step, after a warm-up step."""
    step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def sampling(case: dict[str, object], logits: torch.Tensor, session: Session | None) -> Callable[[], object]:
    rows, vocab = logits.shape
    kernels: StepKernels = NativeStep(session, ()) if session else ReferenceStep()
    sampler = Sampler(vocab, rows, torch.device("cpu"), shared=True)
    prompt = np.random.default_rng(1).integers(0, vocab, 500).tolist()
    for row in range(rows):
        sampler.add(row, SamplingParams(seed=row, max_tokens=1 << 20, **case), 0, prompt, prompt[:100])  # type: ignore[arg-type]
    for change in sampler.changes():
        change.write([torch.from_numpy(array) for array in change.arrays])
    which = np.arange(rows)
    token_ids = torch.tensor([prompt + prompt[:100]] * rows, dtype=torch.int32)
    lines = torch.zeros(LOGIT_LINES, rows, dtype=torch.int32)
    lines[ROW] = torch.from_numpy(which)

    def sample() -> object:
        asked = sampler.plan(which, np.full(rows, 100))
        return kernels.choose(
            logits,
            lines,
            sampler.rows,
            sampler.edits,
            token_ids,
            edited=torch.from_numpy(asked.edited) if len(asked.edited) else None,
            filtered=asked.filtered,
            logprobs=asked.most_logprobs,
        )

    return sample


def measure(case: dict[str, object], logits: torch.Tensor, session: Session | None, steps: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, chooser in (("native", session), ("numpy", None)):
        if name == "numpy" or chooser:
            times = step_times(sampling(case, logits, chooser), steps)
            figures |= {f"{name}_ms": round(min(times), 2), f"{name}_median_ms": round(float(np.median(times)), 2)}
    if session:
        few = step_times(sampling(case, logits[:, :32].contiguous(), session), 10 * steps)
        figures["python_us"] = round(min(few) * 1e3)
    return figures


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--vocab", type=int, default=151936)
    options.add_argument("--rows", type=int, default=32)
    options.add_argument("--steps", type=int, default=15)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    isa = instruction_sets()[:1]
    session = Session(ThreadTeam(isa[0], args.threads)) if isa else None
    figures: list[dict[str, object]] = []
    for kind in ("zipf", "flat"):
        logits = make_logits(kind, args.rows, args.vocab, 0)
        read_ms = min(step_times(partial(logits.numpy().max, -1), args.steps))
        figures.append({"logits": kind, "read_ms": round(read_ms, 2)})
        for name, case in CASES.items():
            figures.append({"logits": kind, "case": name, **measure(case, logits, session, args.steps)})
    about = {
        "benchmark": "sampler",
        "vocab": args.vocab,
        "rows": args.rows,
        "steps": args.steps,
        "threads": args.threads,
    }
    write({**about, "figures": figures}, args.json)


if __name__ == "__main__":
    main()
