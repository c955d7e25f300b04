"""Cost of sampling, in microseconds per row of logits.

    python benchmarks/sampler.py [--vocab 151936] [--rows 32] [--steps 15] [--json FILE]

Two kinds of logits: `zipf` falls off with the rank as a language model's do (1.5 ln rank, some noise); `flat` is normal
with a deviation of 1, as random weights give them, where top_p 0.9 keeps more than half the vocabulary. Medians over
the steps of wall time, and of the sampler's own processor time: it is one thread, so they differ where others compete.
"""

import time

import numpy as np
import torch
from results import parser, write

from penstock.messages import SamplingParams
from penstock.runtime.sampler import Sampler

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


def measure(case: dict[str, object], kind: str, rows: int, vocab: int, steps: int) -> dict[str, float]:
    sampler = Sampler(vocab, rows)
    prompt = np.random.default_rng(1).integers(0, vocab, 500).tolist()
    for row in range(rows):
        sampler.add(row, SamplingParams(seed=row, max_tokens=1 << 20, **case), 0, prompt, prompt[:100])  # type: ignore[arg-type]
    kept = make_logits(kind, rows, vocab, 0)
    wall, cpu = [], []
    for _ in range(steps + 1):
        logits = kept.clone()
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        sampler.sample(logits, range(rows))
        wall.append(time.perf_counter() - begin)
        cpu.append(time.thread_time() - cpu_begin)
    per_row = 1e6 / rows
    return {
        "us_per_row": round(float(np.median(wall[1:])) * per_row, 1),
        "cpu_us_per_row": round(float(np.median(cpu[1:])) * per_row, 1),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--vocab", type=int, default=151936)
    options.add_argument("--rows", type=int, default=32)
    options.add_argument("--steps", type=int, default=15)
    args = options.parse_args()
    figures = [
        {"case": name, "logits": kind, **measure(case, kind, args.rows, args.vocab, args.steps)}
        for name, case in CASES.items()
        for kind in ("zipf", "flat")
    ]
    write({"vocab": args.vocab, "rows": args.rows, "steps": args.steps, "figures": figures}, args.json)


if __name__ == "__main__":
    main()
