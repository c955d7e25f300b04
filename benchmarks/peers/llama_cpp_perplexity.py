"""Measures the perplexity of GGUF files with llama.cpp, over ids that `penstock bench quality --tokens-out` wrote.

    python llama_cpp_perplexity.py PIECES.json MODEL.gguf... [--threads 2] [--kv f16]

PIECES.json is a list of windows, each a list of token ids. What is scored is the same as in `penstock bench quality`:
every token of a window but its first, from the tokens before it. Prints a JSON line for each file: "nats" is the mean
over all scored tokens, "windows" the mean of each window. Needs llama-cpp-python.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32, "q8_0": llama_cpp.GGML_TYPE_Q8_0}


def window_nats(model: llama_cpp.Llama, ids: Sequence[int]) -> float:
    """The sum of -log p over the tokens of a window but its first."""
    model.reset()
    model.eval(ids)
    logits = np.array(model.scores[: len(ids) - 1])
    logits -= logits.max(-1, keepdims=True)
    scored = logits[np.arange(len(ids) - 1), ids[1:]].astype(np.float64)
    return float((np.log(np.exp(logits, out=logits).sum(-1, dtype=np.float64)) - scored).sum())


def score(path: Path, windows: Sequence[Sequence[int]], threads: int, kv: str) -> dict[str, Any]:
    """The figures of one file."""
    model = llama_cpp.Llama(
        str(path),
        n_ctx=max(map(len, windows)) + 8,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        type_k=KV_TYPES[kv],
        type_v=KV_TYPES[kv],
        logits_all=True,
        verbose=False,
    )
    start = time.perf_counter()
    nats = [window_nats(model, ids) for ids in windows]
    seconds = time.perf_counter() - start
    tokens = sum(len(ids) - 1 for ids in windows)
    mean = sum(nats) / tokens
    return {
        "peer": "llama.cpp",
        "version": llama_cpp.__version__,
        "model": str(path),
        "perplexity": round(math.exp(mean), 4),
        "nats": round(mean, 6),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "parameters": llama_cpp.llama_model_n_params(model.model),
        "windows": [round(each / (len(ids) - 1), 6) for each, ids in zip(nats, windows, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pieces", type=Path, metavar="PIECES.json")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv", choices=KV_TYPES, default="f16", help="type of the KV cache")
    args = parser.parse_args()
    windows = json.loads(args.pieces.read_text())
    for path in args.models:
        print(json.dumps(score(path, windows, args.threads, args.kv)), flush=True)


if __name__ == "__main__":
    main()
