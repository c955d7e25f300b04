"""Measures a decode step of latent attention: how fast latents are read, and how fast they are multiplied.

python benchmarks/latent.py --json benchmarks/results/avx512_bf16/latent.json

Each token's latent is read from memory once, for all heads: bytes are those of the compressed cache. The roofline of a
case is the longer of two times: bytes at the bandwidth, and products at the best rate of a GEMM in bf16 or float32.
Both rates are measured just before. `bound_by` says which time it is.
"""

import os
import statistics
from ctypes import c_int64

import numpy as np
import torch
from results import parser, write

from penstock.bench.roofline import measure
from penstock.engine.processors import running_on
from penstock.kernels import AttentionBatch
from penstock.kernels.native.attention import NativeLatentAttention
from penstock.kernels.native.session import native_session
from penstock.messages import Window
from penstock.runtime.pages import allocate

HEADS = {"DeepSeek V2 Lite, Moonlight": 16, "DeepSeek V3": 128}
RANK, ROPE, BLOCK = 512, 64, 16
WIDTH = RANK + ROPE
CASES = ((1, 4096), (8, 1024), (32, 512))  # sequences, tokens of context
LAYERS = 4  # caches that are used in turn: together they are larger than the L2 cache


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--rounds", type=int, default=9)
    given = options.parse_args()
    machine = measure("bfloat16", given.threads)
    session, figures = native_session(threads=given.threads), []
    attention = NativeLatentAttention(session)
    with running_on(set(sorted(os.sched_getaffinity(0))[-given.threads :])):
        for model, heads in HEADS.items():
            for sequences, context in CASES:
                blocks = context // BLOCK
                size = LAYERS * sequences * blocks * BLOCK * WIDTH * 2
                pages = allocate(size, torch.device("cpu")).view(torch.bfloat16).view(LAYERS, -1, 1, BLOCK, WIDTH)
                pages.normal_()
                tables = np.random.default_rng(0).permutation(sequences * blocks).reshape(sequences, blocks)
                lens = np.full(sequences, context)
                batch = AttentionBatch(BLOCK, Window(), np.arange(sequences + 1), lens, tables)
                prepared = attention.prepare(batch, pages[0])
                query = torch.randn(sequences, heads, WIDTH).bfloat16()
                with session.record() as program:
                    program.input(query, c_int64(sequences))
                    for layer in pages:
                        attention.over_latents(query, layer, prepared, WIDTH**-0.5, RANK)
                seconds = statistics.median(statistics.median(program.profile()) for _ in range(given.rounds))
                read = sequences * context * WIDTH * 2
                flops = 2 * sequences * context * heads * (WIDTH + RANK)
                reading, computing = read / machine.bandwidth, flops / machine.gemm_flops
                figures.append(
                    {
                        "heads_of": model,
                        "sequences": sequences,
                        "context": context,
                        "us": round(seconds * 1e6, 1),
                        "gb_s": round(read / seconds / 1e9, 2),
                        "gflops": round(flops / seconds / 1e9, 1),
                        "bound_by": "products" if computing > reading else "bytes",
                        "times_roofline": round(seconds / max(reading, computing), 2),
                    }
                )
    rates = {"gb_s": round(machine.bandwidth / 1e9, 1), "gflops": round(machine.gemm_flops / 1e9)}
    write({"threads": given.threads, "layers": LAYERS, "machine": rates, "figures": figures}, given.json)


if __name__ == "__main__":
    main()
