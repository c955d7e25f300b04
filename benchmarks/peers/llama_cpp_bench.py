"""Runs the cases of compare.py with llama.cpp: N requests of IN random prompt tokens and OUT tokens each.

    python llama_cpp_bench.py MODEL.gguf --cases 1x256/64,8x256/64 [--threads 2] [--kv f16]

The requests are parallel sequences of one context. Prompts fill batches of 512 tokens; then every batch has one token
of each sequence. The next tokens are random, so choosing them takes no time. Prints a JSON line for each case.
"peak_memory_bytes" counts pages of the mapped file that are resident. Needs llama-cpp-python.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
BATCH = 512  # tokens of a step while prompts are computed
WARM_UP = (1, 32, 8)

ERROR = 4  # llama.cpp's level of a message

Token = tuple[int, int, bool]  # position, sequence, whether logits are computed


@llama_cpp.llama_log_callback
def print_errors(level: int, text: bytes, user_data: object) -> None:
    """Drops llama.cpp's messages that are not errors."""
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class Case(NamedTuple):
    count: int
    prompt: int
    output: int


def parse_case(text: str) -> Case:
    """A case such as "8x256/64"."""
    count, lengths = text.split("x")
    prompt, output = lengths.split("/")
    return Case(int(count), int(prompt), int(output))


class Runner:
    """Runs cases on one model."""

    def __init__(self, path: Path, threads: int, kv: str) -> None:
        llama_cpp.llama_log_set(print_errors, None)
        llama_cpp.llama_backend_init()
        start = time.perf_counter()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if self.model is None:
            raise ValueError(f"llama.cpp cannot load {path}: its messages above have the reason")
        self.load_seconds = time.perf_counter() - start
        self._threads, self._kv = threads, KV_TYPES[kv]
        self._random = np.random.default_rng(0)

    def run(self, case: Case) -> float:
        """The seconds of a case, with a context of its own."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = case.count * (case.prompt + case.output + 8)
        params.n_seq_max, params.n_batch, params.n_ubatch = case.count, max(BATCH, case.count), BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._kv
        context = llama_cpp.llama_init_from_model(self.model, params)
        batch = llama_cpp.llama_batch_init(max(BATCH, case.count), 0, 1)
        start = time.perf_counter()
        for tokens in steps(case):
            self._decode(context, batch, tokens)
        elapsed = time.perf_counter() - start
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return elapsed

    def _decode(self, context: Any, batch: Any, tokens: list[Token]) -> None:
        ids = self._random.integers(10, 8000, len(tokens))
        for i, (position, sequence, logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(ids[i]), position, 1, logits
            batch.seq_id[i][0] = sequence
        batch.n_tokens = len(tokens)
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise ValueError(f"llama.cpp cannot compute a step of {len(tokens)} tokens: status {status}")


def steps(case: Case) -> Iterator[list[Token]]:
    """The tokens of each step of a case. The prefill's last step gives the first output token."""
    prompts = [(i, sequence, i == case.prompt - 1) for sequence in range(case.count) for i in range(case.prompt)]
    for first in range(0, len(prompts), BATCH):
        yield prompts[first : first + BATCH]
    for step in range(case.output - 1):
        yield [(case.prompt + step, sequence, True) for sequence in range(case.count)]


def peak_memory() -> int:
    """The peak resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def run_cases(model: Path, cases: str, threads: int, kv: str) -> None:
    """Runs comma-separated cases and prints a line for each."""
    runner = Runner(model, threads, kv)
    runner.run(Case(*WARM_UP))
    parameters = llama_cpp.llama_model_n_params(runner.model)
    for text in cases.split(","):
        case = parse_case(text)
        began = time.perf_counter()
        elapsed = runner.run(case)
        row = {
            "peer": "llama.cpp",
            "version": llama_cpp.__version__,
            "case": text,
            "began": began,
            "elapsed_s": round(elapsed, 4),
            "output_tok_s": round(case.count * case.output / elapsed, 2),
            "load_s": round(runner.load_seconds, 2),
            "peak_memory_bytes": peak_memory(),
            "bits_per_weight": round(model.stat().st_size * 8 / parameters, 3),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--cases", default="1x256/64,8x256/64,32x256/128,1x1024/1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv", choices=KV_TYPES, default="f16", help="type of the KV cache")
    args = parser.parse_args()
    try:
        run_cases(args.model, args.cases, args.threads, args.kv)
    except ValueError as error:
        sys.exit(f"llama_cpp_bench.py: {error}")


if __name__ == "__main__":
    main()
