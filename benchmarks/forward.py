"""Times the model's forward pass alone, at Qwen3-0.6B's shape with random weights, and what each op takes of it.

    python benchmarks/forward.py [--threads N] [--steps N] [--context N] [--json FILE]

Cases are decode steps of 1, 8 and 32 sequences and a prefill, over KV blocks in scattered order. A case's time is the
median of its steps; the cases' steps are interleaved, so that a noisy machine disturbs all alike. A decode's roofline
is weight and KV bytes over the read bandwidth measured in the same run; a prefill has none here.
"""

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from make_model import SHAPES
from results import parser, write

from penstock.config import EngineConfig
from penstock.families import ModelSpec, spec_from_config
from penstock.kernels import Kernels, detect_platform, select_kernels
from penstock.messages import NewSequence, SamplingParams, StepPlan, StepTiming, Work
from penstock.runtime import ModelRunner
from penstock.runtime.heap import keep_freed_memory

BLOCK_SIZE = 16
PREFILL_TOKENS = 256
DECODE_ROWS = (1, 8, 32)


class OpClock:
    """Wraps kernels to add up what each op takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, kernels: Kernels) -> Kernels:
        plain = (f.name for f in dataclasses.fields(kernels) if f.name not in ("fingerprint", "paged_attention"))
        timed: dict[str, Any] = {name: self._timed(name, getattr(kernels, name)) for name in plain}
        return dataclasses.replace(kernels, **timed, paged_attention=_TimedAttention(kernels.paged_attention, self))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds[name] += time.perf_counter() - began
            return result

        return call


class _TimedAttention:
    def __init__(self, attention: Any, clock: OpClock) -> None:
        self.prepare = attention.prepare
        self._call = clock._timed("paged_attention", attention)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Bench:
    """A runner with random weights and as many sequences of `context` tokens as the largest case decodes."""

    def __init__(self, spec: ModelSpec, context: int, steps: int, dtype: torch.dtype) -> None:
        self.clock = OpClock()
        self._plan = 0
        sequences = max(DECODE_ROWS)
        length = context + len(DECODE_ROWS) * (steps + 2)
        blocks_each = -(-length // BLOCK_SIZE)
        prefill_blocks = -(-PREFILL_TOKENS // BLOCK_SIZE)
        num_blocks = 1 + sequences * blocks_each + prefill_blocks
        generator = torch.Generator().manual_seed(0)
        config = EngineConfig(
            model="",
            name="",
            max_model_len=max(length, PREFILL_TOKENS + 1),
            max_num_seqs=sequences + 1,
            block_size=BLOCK_SIZE,
        )
        parameters = {p.name: _random(p.shape, dtype, generator) for p in spec.parameters}
        self.runner = ModelRunner(
            spec, parameters, self.clock.wrap(select_kernels(detect_platform(), dtype)), config, [num_blocks]
        )
        ids = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
        prompt = tuple(torch.randint(spec.vocab_size, (length,), generator=generator).tolist())
        self._prompt = _sequence(sequences, prompt[:PREFILL_TOKENS], 0, ids[:prefill_blocks])
        starts = range(prefill_blocks, len(ids), blocks_each)
        self.runner.pages.groups[0].normal_(generator=generator)
        self._execute(
            new=tuple(
                _sequence(i, prompt[:context], context - 1, ids[start : start + blocks_each])
                for i, start in enumerate(starts)
            )
        )

    def step(self, rows: int) -> StepTiming:
        """One decode step of the first `rows` sequences, or with rows = 0 the prefill of another."""
        if rows:
            return self._execute(work=tuple(Work(i, 1, True) for i in range(rows)))
        seq = self._prompt.seq
        timing = self._execute(work=(Work(seq, PREFILL_TOKENS, True),), new=(self._prompt,))
        self._execute(gone=(seq,))
        return timing

    def _execute(self, *, work: tuple[Work, ...] = (), **changes: Any) -> StepTiming:
        self._plan += 1
        return self.runner.execute(StepPlan(self._plan, work, **changes)).timing


def _sequence(seq: int, tokens: tuple[int, ...], computed: int, blocks: list[int]) -> NewSequence:
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    return NewSequence(seq, tokens, len(tokens), computed, (tuple(blocks),), sampling, 0)


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Like trained weights as far as time goes: finite, and of a size that keeps activations so."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(0, shape[-1] ** -0.5, generator=generator)


def read_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second of a sum over memory that fits no cache; the best of five."""
    data = torch.ones(megabytes << 18)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return data.nbytes / best


def measure(bench: Bench, spec: ModelSpec, steps: int, context: int) -> list[dict[str, Any]]:
    cases = {f"decode {rows}": rows for rows in DECODE_ROWS} | {f"prefill {PREFILL_TOKENS}": 0}
    timings: dict[str, list[StepTiming]] = {name: [] for name in cases}
    ops: dict[str, dict[str, float]] = {name: defaultdict(float) for name in cases}
    for turn in range(steps + 1):  # the first is a warm-up
        for name, rows in cases.items():
            bench.clock.seconds.clear()
            timing = bench.step(rows)
            if turn:
                timings[name].append(timing)
                for op, seconds in bench.clock.seconds.items():
                    ops[name][op] += seconds
    bandwidth = read_bandwidth()
    weights = 2 * spec.num_parameters()
    results = []
    for name, rows in cases.items():
        forward = statistics.median(t.forward for t in timings[name])
        total = sum(t.forward for t in timings[name])
        kv = rows * context * sum(spec.kv_bytes_per_token(g, 2) for g in range(len(spec.windows)))
        results.append(
            {
                "case": name,
                "forward_ms": forward * 1e3,
                "best_ms": min(t.forward for t in timings[name]) * 1e3,
                "roofline_ms": (weights + kv) / bandwidth * 1e3 if rows else None,
                "host_us": statistics.median(t.total - t.forward - t.sample for t in timings[name]) * 1e6,
                "share": {op: s / total for op, s in sorted(ops[name].items(), key=lambda item: -item[1])},
            }
        )
    return results


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=0)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--context", type=int, default=300)
    arguments = options.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    spec = spec_from_config(SHAPES["qwen3-0.6b"])
    bench = Bench(spec, arguments.context, arguments.steps, torch.bfloat16)
    results = measure(bench, spec, arguments.steps, arguments.context)
    write({"benchmark": "forward", "threads": torch.get_num_threads(), "results": results}, arguments.json)


if __name__ == "__main__":
    main()
