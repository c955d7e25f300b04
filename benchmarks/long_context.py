"""Measures long contexts on the model runner: decode at 16 k tokens with 1 and 4 sequences, and a prompt of 8 k.

    python benchmarks/long_context.py MODEL_DIR [--kv-cache-dtype int8] [--quantization int8] [--json FILE]

Decode: the median wall time of a step, as a share of the least time in which memory can deliver all weights, keys and
values. The pages hold random numbers, as computing so many tokens would take minutes.

Prefill: some of the prompt's chunks of 512 tokens are computed, evenly spread. A chunk's time grows linearly with its
position, so their mean stands for the whole. The rate of multiply-adds, counted twice, is compared with torch's best
GEMM and with the best product for the weights. The machine is measured before and after both parts.
"""

import argparse
import os
from typing import Any, NamedTuple

import torch
from affinity import probing
from op_timing.cost import OpCost, op_cost
from op_timing.step_timer import StepBreakdown, StepTimer, longest_sequence
from results import parser, write

from penstock.bench.roofline import MachineProbe, MachineRates, average
from penstock.config import EngineConfig
from penstock.config.facts import SCALE_BYTES
from penstock.config.weights import stored_as
from penstock.messages import NewSequence, SamplingParams, StepPlan, Work
from penstock.prepare.model import prepare
from penstock.runtime.loading.cpu import load_cpu_runner
from penstock.runtime.runner import ModelRunner

CONTEXT, SEQUENCES = 16_384, (1, 4)  # of the decode
PROMPT, CHUNK = 8192, 512  # tokens of the prompt, and of a step of it
INT8_SCALE = 0.02  # scale of a token's keys or values: 127 times it is about the largest element of a normed key


def fill(runner: ModelRunner) -> None:
    """Fills every block except the null block with the same random numbers."""
    size = runner.pages.block_size
    for pages in runner.pages.groups:
        block = pages[1]
        if pages.dtype != torch.int8:
            block.normal_()
        else:
            block.random_(-127, 128)
            heads = block.flatten(-2)
            heads[..., -size * SCALE_BYTES :].view(torch.float32).fill_(INT8_SCALE)
        pages[2:] = block


def decode(runner: ModelRunner, machine: MachineRates, steps: int) -> list[StepBreakdown]:
    """Times decode steps for each number of sequences."""
    decoding = StepTimer(runner, CONTEXT, SEQUENCES, steps)
    fill(runner)
    return decoding.measure(machine)


def row(found: StepBreakdown, machine: MachineRates) -> dict[str, Any]:
    attention, whole = (next(line for line in found.lines if line.name == name) for name in ("attention", "step"))
    moved = (whole.gb_s or 0.0) * whole.us * 1e3  # bytes
    return {
        "case": f"decode, {found.rows} x {CONTEXT}",
        "ms": round(found.wall_us / 1e3, 2),
        "attention_ms": round(attention.us / 1e3, 2),
        "gb": round(moved / 1e9, 3),
        "bandwidth_fraction": round(moved / machine.bandwidth / found.wall_us * 1e6, 4),
        "attention_bandwidth_fraction": round((attention.gb_s or 0.0) * 1e9 / machine.bandwidth, 4),
    }


class Prefill(NamedTuple):
    """The time and the work of some of the prompt's chunks."""

    chunks: int
    done: OpCost
    seconds: float
    attention_seconds: float

    def row(self, machine: MachineRates) -> dict[str, Any]:
        rate, whole = self.done.flops / self.seconds, PROMPT // CHUNK
        return {
            "case": f"prefill, {PROMPT} in chunks of {CHUNK}: {self.chunks} of {whole}",
            "s": round(self.seconds / self.chunks * whole, 2),
            "gflop_s": round(rate / 1e9, 1),
            "gemm_fraction": round(rate / machine.gemm_flops, 4),
            "product_fraction": round(rate / machine.flops, 4),
            "attention_share": round(self.attention_seconds / self.seconds, 4),
        }


def prefill(runner: ModelRunner, chunks: int) -> Prefill:
    """Times some chunks. Each is a separate sequence with all tokens before it in the cache."""
    size = runner.capacity.block_size
    tokens = tuple(17 * i % runner.capacity.vocab_size for i in range(PROMPT + 1))
    tables = tuple(tuple(range(1, 1 + -(-len(tokens) // size))) for _ in runner.capacity.groups)
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    last = PROMPT // CHUNK - 1
    done, seconds, attention = OpCost(), 0.0, 0.0
    for i in range(chunks):
        first = round(i * last / max(1, chunks - 1)) * CHUNK
        new = NewSequence(100 + i, tokens, PROMPT, first, tables, sampling, 0)
        with runner.profile() as timed:
            result = runner.execute(StepPlan(1000 + i, work=(Work(new.seq, CHUNK, False),), new=(new,)))
        assert result is not None, "one rank reports"
        seconds += result.timing.total
        for label, op, took in timed:
            done += op_cost(op)
            attention += took if label == "attention" else 0.0
    return Prefill(chunks, done, seconds, attention)


def engine_of(args: argparse.Namespace) -> EngineConfig:
    flags = {
        "max_model_len": max(longest_sequence(CONTEXT, SEQUENCES, args.steps), PROMPT + CHUNK),
        "max_num_seqs": max(SEQUENCES) + args.chunks,
        "max_num_batched_tokens": CHUNK,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
    }
    return prepare(args.model, flags).resolved.engine


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model")
    arguments.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8"))
    arguments.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    arguments.add_argument("--steps", type=int, default=7, help="decode steps of each case")
    arguments.add_argument("--chunks", type=int, default=4, help="chunks of the prompt that are computed")
    args = arguments.parse_args()
    cpus = os.sched_getaffinity(0)
    engine = engine_of(args)
    probe = probing(MachineProbe(engine.dtype, engine.threads, engine.quantization), cpus)
    runner = load_cpu_runner(engine)
    first = probe()
    decoded = decode(runner, first, args.steps)
    second = probe()
    prefilled = prefill(runner, args.chunks)
    for_decode, for_prefill = average(first, second), average(second, probe())
    rows = [*(row(each, for_decode) for each in decoded), prefilled.row(for_prefill)]
    figures = {
        "model": engine.name,
        "weights": stored_as(engine),
        "kv_cache_dtype": args.kv_cache_dtype,
        "roofline": {
            "decode_gb_s": round(for_decode.bandwidth / 1e9, 1),
            "prefill_gemm_gflop_s": round(for_prefill.gemm_flops / 1e9, 1),
            "prefill_product_gflop_s": round(for_prefill.flops / 1e9, 1),
        },
        "rows": rows,
    }
    write({"benchmark": "long_context", **figures}, args.json)


if __name__ == "__main__":
    main()
