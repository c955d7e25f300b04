"""Counts the bytes that decoding with latent attention reads from memory, over the bytes of its latents.

    python benchmarks/latent_reads.py --json benchmarks/results/avx512_bf16/latent_reads.json

Cachegrind (Debian's `valgrind`) simulates one core and counts the misses in our kernels. Its last cache has 1 MiB, as a
core's own L2 cache often has, or 4 MiB, as if the core also had a share of an L3 cache. The latents are larger than
both. Cachegrind knows AVX2 but not AVX512, whose kernels are made from the same C++.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from latent import BLOCK, HEADS, RANK, WIDTH
from results import parser, write

from penstock.kernels import AttentionBatch
from penstock.kernels.native.attention import NativeLatentAttention
from penstock.kernels.native.session import native_session
from penstock.messages import Window
from penstock.runtime.pages import allocate

SEQUENCES, CONTEXT, STEPS = 2, 4096, 2
CACHES, LINE = (1 << 20, 4 << 20), 64  # bytes
BYTES = SEQUENCES * CONTEXT * WIDTH * 2


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--step-of", type=int, metavar="HEADS", help="attend with so many heads, and measure nothing")
    given = options.parse_args()
    if given.step_of:
        attend(given.step_of)
        return
    figures = []
    for model, heads in HEADS.items():
        for cache in CACHES:
            read = sum(missed(heads, cache)) * LINE / STEPS
            figures.append({"heads_of": model, "last_cache": cache, "times_latents": round(read / BYTES, 2)})
    write({"sequences": SEQUENCES, "context": CONTEXT, "latent_bytes": BYTES, "figures": figures}, given.json)


def attend(heads: int) -> None:
    """Runs the decode steps that cachegrind measures."""
    attention = NativeLatentAttention(native_session(threads=1))
    blocks = CONTEXT // BLOCK
    pages = allocate(BYTES, torch.device("cpu")).view(torch.bfloat16).view(-1, 1, BLOCK, WIDTH).fill_(0.5)
    tables = np.random.default_rng(0).permutation(SEQUENCES * blocks).reshape(SEQUENCES, blocks)
    lens = np.full(SEQUENCES, CONTEXT)
    prepared = attention.prepare(AttentionBatch(BLOCK, Window(), np.arange(SEQUENCES + 1), lens, tables), pages)
    query = torch.ones(SEQUENCES, heads, WIDTH).bfloat16()
    for _ in range(STEPS):
        attention.over_latents(query, pages, prepared, WIDTH**-0.5, RANK)


def missed(heads: int, last_cache: int) -> Iterator[int]:
    """The cache lines that our functions read from memory, one number for each line of source."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "cachegrind"
        cache = ("--cache-sim=yes", f"--LL={last_cache},16,{LINE}", f"--cachegrind-out-file={report}")
        subprocess.run(
            ["valgrind", "--tool=cachegrind", *cache, sys.executable, __file__, "--step-of", str(heads)],
            env={**os.environ, "PENSTOCK_ISA": "avx2", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
            check=True,
        )
        events, ours = [], False
        for line in report.read_text(errors="replace").splitlines():
            if line.startswith("events:"):
                events = line.split()
            elif line.startswith("fn="):
                ours = "penstock::" in line
            elif ours and line[:1].isdigit():
                yield int(line.split()[events.index("DLmr")])


if __name__ == "__main__":
    main()
