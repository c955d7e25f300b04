"""Times every native op by itself, on shapes of real models, with its weights or pages read from memory."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from calm import Watch, kept
from torch import Tensor

from op_timing.cost import OpCost, op_cost
from penstock.bench.roofline import MachineRates
from penstock.config.facts import SCALE_BYTES
from penstock.config.weights import BF16, F32, GGUF_FORMATS, INT8, INT16, WeightFormat, held_as, int4_format
from penstock.kernels import AttentionBatch
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.layout import Layout
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.moe import NativeExperts
from penstock.kernels.native.norm import NativeNorm
from penstock.kernels.native.pack import pack
from penstock.kernels.native.packing import PackedWeight, packed_weight
from penstock.kernels.native.session import Program, Session
from penstock.kernels.routing import Routing
from penstock.messages import Window

# Weights packed from floats, and random codes in formats of GGUF files (Q8_0's is int8).
FORMATS = {"f32": F32, "bf16": BF16, "int16": INT16, "int8": INT8, "int4": int4_format(32)}
FORMATS |= {name: GGUF_FORMATS[name] for name in ("Q4_0", "Q4_K", "Q6_K")}
FORMATS = {name: held_as(fmt, next(iter(instruction_sets()), "")) for name, fmt in FORMATS.items()}
NARROW = tuple(FORMATS)[1:]  # but for fp32
SHAPES = ((3072, 1024), (4864, 896), (1600, 960))  # [n, k]: Qwen3-0.6B, Qwen2.5-0.5B, SmolLM2-360M (15 heads over 5)
ROWS = (1, 8, 32, 256)
VOCAB = 151_936
SLAB = 512  # rows of a weight that are drawn and packed; a longer weight repeats them
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 8, 128, 16
COUNT, SLOTS, EXPERT = 64, 8, (512, 1024)  # experts; experts of a token; (width of an expert, hidden size)
CONTEXTS = (512, 4096, 16_384)  # of a decode step
PROMPT, BEFORE = 512, (0, 4096)  # prompt tokens computed, and prompt tokens that are in the cache already
SECONDS = 0.02  # a case repeats for at least this long in a window,
WINDOWS = 7  # of which it has so many
WORKING_SET = (128 << 20, 1 << 30)  # bytes: twice the last-level cache, within these limits
MOST_COPIES = 256
WARM_UP_FLOPS = 4e10  # limit for all copies together: a case that multiplies much is not bound by memory


class KernelTiming(msgspec.Struct, frozen=True):
    """A case with its median time."""

    op: str
    shape: str
    dtype: str  # of the weight, or of the pages
    rows: int
    us: float
    gb_s: float
    gflop_s: float
    working_set_mb: float
    roofline_fraction: float
    calm: bool | None  # see calm.py


@dataclass(frozen=True)
class KernelCase:
    """One op on one shape. `record(program, i)` records the op on the i-th copy of its inputs."""

    op: str
    shape: str
    dtype: str
    rows: int
    record: Callable[[Program, int], object]


class _Timed(NamedTuple):
    case: KernelCase
    seconds: float  # median
    cost: OpCost
    touched: float  # bytes that all copies together read and write
    calm: bool | None

    def measured(self, machine: MachineRates) -> KernelTiming:
        case, done, seconds = self.case, self.cost, self.seconds
        rates = (round(rate / seconds / 1e9, 2) for rate in (done.bytes, done.flops))
        fraction = round(done.least_seconds(machine) / seconds, 4)
        figures = (round(seconds * 1e6, 1), *rates, round(self.touched / 1e6, 1), fraction, self.calm)
        return KernelTiming(case.op, case.shape, case.dtype, case.rows, *figures)


def measure_kernels(
    session: Session, machine: MachineRates, ops: Sequence[str], progress: Callable[[str], None], watch: Watch
) -> tuple[list[KernelTiming], MachineRates]:
    """Times all cases of `ops`. Also returns the better of `machine` and the best rates of these kernels."""
    size, found, flops, bandwidth = _working_set(), list[_Timed](), dict[str, float](), machine.bandwidth
    for op in ops:
        for case in OPS[op](session):
            progress(f"{case.op} {case.shape} {case.dtype}, {case.rows} rows")
            timed = _time(session, case, size, watch)
            found.append(timed)
            flops[case.dtype] = max(flops.get(case.dtype, machine.flops), timed.cost.flops / timed.seconds)
            if timed.touched >= size:
                bandwidth = max(bandwidth, timed.cost.bytes / timed.seconds)
    measured = [timed.measured(MachineRates(bandwidth, flops[timed.case.dtype])) for timed in found]
    return measured, MachineRates(bandwidth, max(flops.values(), default=machine.flops))


def _working_set() -> int:
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    return max(WORKING_SET[0], min(2 * cache, WORKING_SET[1]))


def _time(session: Session, case: KernelCase, working_set: int, watch: Watch) -> _Timed:
    """Times a case on copies of its inputs in turn, so that no copy is in a cache. Calls in calm windows count."""

    def recorded(i: int) -> Program:
        with session.record() as program:
            case.record(program, i)
        return program

    programs = [recorded(0)]
    [timed] = programs[0].timed(programs[0].profile())
    done = op_cost(timed.op)
    copies = min(-(-working_set // int(done.bytes)), MOST_COPIES)
    if done.flops:
        copies = min(copies, int(WARM_UP_FLOPS / done.flops) + 1)
    programs += [recorded(i) for i in range(1, copies)]
    for program in programs:
        program.run()
    windows, copy = [], itertools.cycle(programs)
    for _ in range(WINDOWS):
        began, times = watch.wait(), list[float]()
        while not times or time.perf_counter() < began + SECONDS:
            times += next(copy).profile()
        windows.append((times, watch.calm(began)))
    chosen, calm = kept(windows)
    return _Timed(case, statistics.median(itertools.chain(*chosen)), done, copies * done.bytes, calm)


# -- products ---------------------------------------------------------------------------------------------------


def _random_codes(n: int, k: int, fmt: WeightFormat, *, gated: bool) -> PackedWeight:
    """A weight of random codes whose values are small."""
    layout, random = Layout(n, k, fmt, gated), np.random.default_rng(0)
    parts = layout.empty()
    for part in parts.values():
        if part is not None and part.dtype.kind == "f":
            part[...] = 2.0**-12
        elif part is not None:
            part[...] = random.integers(0, 1 << (8 if part.dtype == np.uint8 else 6), part.shape)
    return packed_weight(layout, parts)


_MEMORY = WeightMemory()


def _in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy in memory like that of a model's weights. In small pages eight rows took up to 1.6 times as long."""
    copy = torch.from_numpy(_MEMORY.empty(tuple(tensor.shape), tensor.numpy().dtype))
    return copy.copy_(tensor)


class _Weights:
    """Copies of a packed weight [n, k] of small random values, made on first use."""

    def __init__(self, n: int, k: int, name: str, *, gated: bool = False) -> None:
        if name in GGUF_FORMATS:
            packed = _random_codes(min(n, SLAB), k, FORMATS[name], gated=gated)
        else:
            dtype = torch.float32 if name == "f32" else torch.bfloat16
            packed = pack((torch.randn(min(n, SLAB), k) / k**0.5).to(dtype), None, FORMATS[name], gated=gated)
        repeats = -(-n // SLAB)
        blocks = -(-n // 16)

        def longer(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            each = tensor.view(-(-min(n, SLAB) // 16), -1)
            return _in_huge_pages(each.repeat(repeats, 1)[:blocks].reshape(-1))

        parts = {name: longer(part) for name, part in packed.parts.items()}
        self._copies = [replace(packed, n=n, **parts)]  # type: ignore[arg-type]

    def __call__(self, i: int) -> PackedWeight:
        while len(self._copies) <= i:
            first = self._copies[0]
            parts = {name: None if part is None else _in_huge_pages(part) for name, part in first.parts.items()}
            self._copies.append(replace(first, **parts))  # type: ignore[arg-type]
        return self._copies[i]


def _input(program: Program, tensor: Tensor) -> Tensor:
    return program.input(tensor, c_int64(len(tensor)))


def _activations(rows: int, width: int, scheme: str = "bf16") -> Tensor:
    return torch.randn(rows, width).to(torch.float32 if scheme == "f32" else torch.bfloat16)


def _linear(session: Session) -> Iterator[KernelCase]:
    linear = NativeLinear(session)
    for n, k in SHAPES:
        for scheme in FORMATS:
            weights = _Weights(n, k, scheme)
            for rows in ROWS:
                x = _activations(rows, k, scheme)

                def record(program: Program, i: int, x: Tensor = x, weights: _Weights = weights) -> Tensor:
                    return linear(_input(program, x), weights(i))

                yield KernelCase("linear", f"{n}x{k}", scheme, rows, record)


def _gated(session: Session) -> Iterator[KernelCase]:
    linear = NativeLinear(session)
    n, k = 2 * 4864, 896
    for scheme in FORMATS:
        weights = _Weights(n, k, scheme, gated=True)
        for rows in ROWS:
            x = _activations(rows, k, scheme)

            def record(program: Program, i: int, x: Tensor = x, weights: _Weights = weights) -> Tensor:
                return linear.gated(_input(program, x), weights(i), "silu")

            yield KernelCase("gated", f"{n}x{k}", scheme, rows, record)


def _logits(session: Session) -> Iterator[KernelCase]:
    linear = NativeLinear(session)
    k = 1024
    for scheme in NARROW:
        weights = _Weights(VOCAB, k, scheme)
        for rows in (1, 8, 32):
            x = _activations(rows, k)

            def record(program: Program, i: int, x: Tensor = x, weights: _Weights = weights) -> Tensor:
                return linear.logits(_input(program, x), weights(i))

            yield KernelCase("logits", f"{VOCAB}x{k}", scheme, rows, record)


def _embedding(session: Session) -> Iterator[KernelCase]:
    linear = NativeLinear(session)
    k = 1024
    for scheme in NARROW:
        table = _Weights(VOCAB, k, scheme)(0)
        for rows in (32, 256, 2048):

            def record(program: Program, i: int, rows: int = rows, table: PackedWeight = table) -> Tensor:
                return linear.rows(_input(program, torch.randint(VOCAB, (rows,))), table, 1.0, torch.bfloat16)

            yield KernelCase("embedding", f"{VOCAB}x{k}", scheme, rows, record)


def _stacked(weight: PackedWeight) -> PackedWeight:
    """COUNT copies of a weight as one stack."""
    parts = {name: None if part is None else part.repeat(COUNT) for name, part in weight.parts.items()}
    return replace(weight, count=COUNT, **parts)  # type: ignore[arg-type]


def _experts(session: Session) -> Iterator[KernelCase]:
    """Each copy draws its own choice of experts. All experts have the same values."""
    experts = NativeExperts(session)
    width, hidden = EXPERT
    for scheme in NARROW:
        stacks = [
            _stacked(_Weights(n, k, scheme, gated=gated)(0))
            for n, k, gated in ((2 * width, hidden, True), (hidden, width, False))
        ]
        for rows in ROWS:
            x = _activations(rows, hidden)

            def record(program: Program, i: int, x: Tensor = x, stacks: list[PackedWeight] = stacks) -> Tensor:
                chosen = torch.rand(len(x), COUNT).argsort()[:, :SLOTS].contiguous()
                weights = torch.full((len(x), SLOTS), 1 / SLOTS)
                routing = Routing(_input(program, chosen), _input(program, weights))
                return experts(_input(program, x), routing, stacks[0], stacks[1], "silu")

            yield KernelCase("experts", f"{SLOTS} of {COUNT}, {width}x{hidden}", scheme, rows, record)


# -- ops that visit each element once ------------------------------------------------------------------------------


def _norm(session: Session) -> Iterator[KernelCase]:
    norm = NativeNorm(session)
    for width in (1024, 896):
        weight = torch.ones(width, dtype=torch.bfloat16)
        for rows in (1, 32, 2048):

            def record(program: Program, i: int, rows: int = rows, weight: Tensor = weight) -> object:
                x, residual = (_input(program, _activations(rows, len(weight))) for _ in range(2))
                return norm(x, residual, weight, 1e-6, 0.0)

            yield KernelCase("norm", str(width), "bf16", rows, record)


def _store(session: Session) -> Iterator[KernelCase]:
    attention = NativeAttention(session)
    weight = torch.ones(HEADS + KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.int8):
        pages = _pages(2 * 2048 // BLOCK, dtype)
        for rows in (1, 32, 2048):

            def record(program: Program, i: int, rows: int = rows, pages: Tensor = pages) -> Tensor:
                qkv = _input(program, _activations(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM))
                rotation = _input(program, torch.ones(rows, 2, HEAD_DIM // 2))
                slots = torch.randperm(len(pages) * BLOCK)[:rows]
                where = (_input(program, slots // BLOCK), _input(program, slots % BLOCK))
                return attention.store(
                    qkv, HEADS, weight, rotation, pages[:, 0], pages[:, 1], *where, eps=1e-6, offset=0.0
                )

            yield KernelCase("store", _heads(), _name(dtype), rows, record)


# -- attention --------------------------------------------------------------------------------------------------


def _attention(session: Session) -> Iterator[KernelCase]:
    """Decode steps at several contexts, of one sequence and of eight; prefill at a prompt's start and further on."""
    cases = [(sequences, 1, context) for context in CONTEXTS for sequences in (1, 8)]
    cases += [(1, PROMPT, before + PROMPT) for before in BEFORE]
    for dtype in (torch.bfloat16, torch.int8):
        most = max(sequences * context for sequences, _, context in cases)
        pages = _pages(max(most * 2, 1 << 16) // BLOCK, dtype)
        for sequences, queries, context in cases:
            yield _attention_case(NativeAttention(session), pages, sequences, queries, context)


def _attention_case(
    attention: NativeAttention, pages: Tensor, sequences: int, queries: int, context: int
) -> KernelCase:
    """Copies use successive blocks of the pages, and start over at their end."""
    blocks = context // BLOCK
    starts = np.arange(sequences + 1) * queries
    query = _activations(sequences * queries, HEADS * HEAD_DIM).view(-1, HEADS, HEAD_DIM)
    order = np.random.default_rng(0).permutation(len(pages))

    def record(program: Program, i: int) -> Tensor:
        tables = order[np.arange(i * sequences * blocks, (i + 1) * sequences * blocks) % len(order)]
        contexts = np.full(sequences, context)
        batch = AttentionBatch(BLOCK, Window(), starts, contexts, tables.reshape(sequences, blocks))
        prepared = attention.prepare(batch, pages[:, 0])
        return attention(_input(program, query), pages[:, 0], pages[:, 1], prepared, HEAD_DIM**-0.5)

    kind = "prefill" if queries > 1 else "decode"
    return KernelCase("attention", f"{kind} at {context}", _name(pages.dtype), sequences * queries, record)


def _pages(count: int, dtype: torch.dtype) -> Tensor:
    """[count, 2, KV heads, block, head size, in int8 with a scale]: zeros, written so that memory is allocated."""
    width = HEAD_DIM + SCALE_BYTES if dtype == torch.int8 else HEAD_DIM
    return torch.empty(count, 2, KV_HEADS, BLOCK, width, dtype=dtype).zero_()


def _heads() -> str:
    return f"{HEADS}/{KV_HEADS} x {HEAD_DIM}"


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.int8: "int8"}[dtype]


OPS: dict[str, Callable[[Session], Iterator[KernelCase]]] = {
    "linear": _linear,
    "gated": _gated,
    "logits": _logits,
    "embedding": _embedding,
    "experts": _experts,
    "norm": _norm,
    "store": _store,
    "attention": _attention,
}
