"""Times every op of the GPU by itself at sizes of real models, beside the bytes and operations that it needs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_figures.peaks import seconds_of
from gpu_figures.roofline import Peaks
from penstock.config.facts import SCALE_BYTES
from penstock.config.weights import GGUF_FORMATS
from penstock.kernels.attention import AttentionBatch, PagedAttention
from penstock.kernels.batch_arrays import FILTERED, LOGIT_LINES, PLAIN, ROW, EditRows, SamplingRows
from penstock.kernels.linear import DenseWeight
from penstock.kernels.triton.attention import TritonAttention
from penstock.kernels.triton.experts import TritonExperts
from penstock.kernels.triton.gate import gate, quantized_gate
from penstock.kernels.triton.linear import TritonLinear
from penstock.kernels.triton.norm import TritonNorm
from penstock.kernels.triton.sampling.choose import choose
from penstock.kernels.triton.weights import (
    CodedWeight,
    QuantizedWeight,
    Scheme,
    Weight,
    empty_codes,
    empty_weight,
    write_rows,
)
from penstock.messages import Window

FLUSH = 256 << 20  # least bytes of all copies of an op's inputs together: several times a cache of 60 MB
MOST_COPIES = 32
BLOCK = 16
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PIECE_ROWS = 4096
GGUF_TYPES = ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS")  # half bytes and bytes, groups of 32 and 16, minima, and a table


@dataclass(frozen=True)
class Sizes:
    """Sizes of Llama-3.1-8B's layers and of Qwen3-30B-A3B's experts."""

    products: tuple[tuple[str, int, int], ...] = (("qkv", 6144, 4096), ("down", 4096, 14336), ("gate_up", 28672, 4096))
    rows: tuple[int, ...] = (1, 16, 64, 512, 2048)
    hidden: int = 4096
    inner: int = 14336
    heads: tuple[int, int, int] = (32, 8, 128)  # query heads, KV heads, their size
    decodes: tuple[tuple[int, int], ...] = ((1, 8192), (32, 8192), (256, 1024))  # sequences, context
    prompts: tuple[int, ...] = (2048, 8192)
    vocab: int = 128256
    experts: tuple[int, int, int, int] = (
        128,
        8,
        768,
        2048,
    )  # experts, experts of a token, width of an expert, hidden size
    expert_tokens: tuple[int, ...] = (1, 64, 2048)
    copies: int = MOST_COPIES


SMALL = Sizes(
    (("qkv", 96, 64),), (3,), 64, 128, (4, 2, 16), ((2, 20),), (9,), 300, (4, 2, 32, 64), (3,), copies=1
)  # shows that everything runs


@dataclass(frozen=True)
class Op:
    """One op on one shape. `make()` returns a run on a new copy of its inputs."""

    name: str
    shape: str
    bytes: float  # the least bytes that it moves
    flops: float
    make: Callable[[], Callable[[], object]]
    eight_bits: bool = False  # tensor cores multiply bytes


def measure(sizes: Sizes, peaks: Peaks, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a row for each op: its time, rates and share of the roofline."""
    for ops in (_attention, _products, _experts, _sampling, _elementwise):
        yield from _rows(ops(sizes, device), sizes, peaks, device)


def _rows(ops: Iterable[Op], sizes: Sizes, peaks: Peaks, device: torch.device) -> Iterator[dict[str, Any]]:
    for op in ops:
        yield _row(op, sizes, peaks, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _row(op: Op, sizes: Sizes, peaks: Peaks, device: torch.device) -> dict[str, Any]:
    copies = int(min(max(FLUSH // max(op.bytes, 1), 1) + 1, sizes.copies))
    seconds = seconds_of([op.make() for _ in range(copies)], device)
    rate = peaks.fp8_flops if op.eight_bits else peaks.bf16_flops
    least = max(op.bytes / peaks.bandwidth, op.flops / rate if rate else 0.0)
    return {
        "op": op.name,
        "shape": op.shape,
        "us": round(seconds * 1e6, 2),
        "gb_s": round(op.bytes / seconds / 1e9, 1),
        "tflop_s": round(op.flops / seconds / 1e12, 2),
        "share_of_roofline": round(least / seconds, 3),
    }


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16, device=device).normal_()


def weight(scheme: str, n: int, k: int, device: torch.device) -> Weight:
    """Packs random weights slice by slice: a whole stack of experts in bf16 would take too much memory. Of a GGUF type,
    codes and scales are random bits."""
    if scheme == "bf16":
        return DenseWeight(_normal(device, n, k), None)
    if scheme in GGUF_FORMATS:
        return _random_codes(empty_codes(n, k, GGUF_FORMATS[scheme], device))
    kind: Scheme = scheme  # type: ignore[assignment]
    packed = empty_weight(n, k, kind, 32, device)
    part = empty_weight(min(n, PIECE_ROWS), k, kind, 32, device)
    write_rows(part, 0, _normal(device, min(n, PIECE_ROWS), k))
    for start in range(0, n, PIECE_ROWS):
        count = min(PIECE_ROWS, n - start)
        if isinstance(packed, CodedWeight) and isinstance(part, CodedWeight):
            packed.codes[:, start : start + count] = part.codes[:, :count]
        elif isinstance(packed, QuantizedWeight) and isinstance(part, QuantizedWeight):
            packed.values[start : start + count] = part.values[:count]
        packed.scales.narrow(-1, start, count).copy_(part.scales.narrow(-1, 0, count))
    return packed


def _random_codes(weight: CodedWeight) -> CodedWeight:
    weight.codes.random_(0, 256)
    for factors in weight.factors:
        if factors is not None:
            factors.fill_(0.01) if factors.is_floating_point() else factors.random_(-64, 64)
    return weight


def _bits(scheme: str) -> float:
    """The bits of a weight with its share of scales."""
    if scheme in GGUF_FORMATS:
        return GGUF_FORMATS[scheme].bits_per_weight
    return {"bf16": 16.0, "int4": 4.5}.get(scheme, 8.0)


def _products(sizes: Sizes, device: torch.device) -> Iterator[Op]:
    for name, n, k in sizes.products:
        for scheme in ("bf16", "bf16 fixed", "fp8", "int8", "int4", *GGUF_TYPES):
            for rows in sizes.rows:

                def make(scheme: str = scheme, n: int = n, k: int = k, rows: int = rows) -> Callable[[], object]:
                    linear = TritonLinear(fixed=scheme.endswith("fixed"))
                    own, x = weight(scheme.split()[0], n, k, device), _normal(device, rows, k)
                    return lambda: linear(x, own)

                moved = n * k * _bits(scheme.split()[0]) / 8 + rows * (n + k) * 2
                eight = scheme in ("fp8", "int8")
                yield Op(f"linear {scheme}", f"{name} {rows}x{k}x{n}", moved, 2.0 * rows * n * k, make, eight)


def _elementwise(sizes: Sizes, device: torch.device) -> Iterator[Op]:
    hidden, inner, norm = sizes.hidden, sizes.inner, TritonNorm()
    heads, kv_heads, head_dim = sizes.heads
    for rows in sizes.rows:

        def norms(quantized: bool, rows: int = rows) -> Callable[[], object]:
            x, residual, factor = (_normal(device, *shape) for shape in ((rows, hidden), (rows, hidden), (hidden,)))
            if quantized:
                return lambda: norm.quantized(x, residual, factor, 1e-5, 0.0, dtype=FP8)
            return lambda: norm(x, residual, factor, 1e-5, 0.0)

        def gates(quantized: bool, rows: int = rows) -> Callable[[], object]:
            x = _normal(device, rows, 2 * inner)
            return lambda: quantized_gate(x, "silu", FP8) if quantized else gate(x, "silu")

        def stores(dtype: torch.dtype, rows: int = rows) -> Callable[[], object]:
            attention, keys, values = TritonAttention(), *_pages(rows // BLOCK + 1, kv_heads, head_dim, dtype, device)
            qkv = _normal(device, rows, (heads + 2 * kv_heads) * head_dim)
            where = torch.arange(rows, device=device)
            factor = _normal(device, heads + kv_heads, head_dim)
            turns = attention.rotation(where, torch.ones(2, head_dim // 2, device=device), BF16)
            blocks, offsets = where // BLOCK, where % BLOCK
            return lambda: attention.store(qkv, heads, factor, turns, keys, values, blocks, offsets, 1e-6, 0.0)

        for quantized in (False, True):
            kind, size = ("fp8", 1) if quantized else ("bf16", 2)
            dtype = FP8 if quantized else BF16
            wide = rows * hidden
            yield Op(f"norm to {kind}", f"{rows}x{hidden}", wide * (6 + size), 0.0, partial(norms, quantized))
            moved = rows * inner * (4 + size)
            yield Op(f"gate to {kind}", f"{rows}x{inner}", moved, 0.0, partial(gates, quantized))
            moved = rows * head_dim * (4 * heads + kv_heads * (4 + 2 * size))
            yield Op(f"store {kind}", f"{rows} tokens", moved, 0.0, partial(stores, dtype))


def _pages(
    blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer."""
    if dtype == BF16:
        pages = _normal(device, blocks, 2, kv_heads, BLOCK, head_dim)
    else:
        shape = blocks, 2, kv_heads, BLOCK, head_dim + SCALE_BYTES
        pages = torch.randint(0, 120, shape, dtype=torch.uint8, device=device).view(FP8)  # none is NaN
        pages.flatten(3)[..., BLOCK * head_dim :].view(torch.float32).fill_(0.01)
    return pages[:, 0], pages[:, 1]


def _attention(sizes: Sizes, device: torch.device) -> Iterator[Op]:
    cases = [*(("decode", *case) for case in sizes.decodes), *(("prefill", 1, length) for length in sizes.prompts)]
    fixed = partial(TritonAttention, fixed=True)
    for case in cases:
        for name, dtype, provider in (
            ("bf16", BF16, TritonAttention),
            ("fp8", FP8, TritonAttention),
            ("bf16 fixed", BF16, fixed),
        ):
            yield _attention_op(sizes, device, *case, name, dtype, provider)


def _attention_op(
    sizes: Sizes,
    device: torch.device,
    kind: str,
    count: int,
    context: int,
    name: str,
    dtype: torch.dtype,
    provider: Callable[[], PagedAttention],
) -> Op:
    heads, kv_heads, head_dim = sizes.heads
    queries = 1 if kind == "decode" else context

    def make() -> Callable[[], object]:
        attention, each = provider(), -(-context // BLOCK)
        keys, values = _pages(1 + count * each, kv_heads, head_dim, dtype, device)
        tables = 1 + np.random.default_rng(0).permutation(count * each).reshape(count, each)
        start, contexts = np.arange(count + 1) * queries, np.full(count, context)
        prepared = attention.prepare(AttentionBatch(BLOCK, Window(), start, contexts, tables), keys)
        query = _normal(device, count * queries, heads, head_dim)
        return lambda: attention(query, keys, values, prepared, head_dim**-0.5)

    width = head_dim * 2 if dtype == BF16 else head_dim + SCALE_BYTES
    moved = count * context * kv_heads * width * 2 + 4 * count * queries * heads * head_dim
    seen = context if kind == "decode" else context / 2  # mean context of a query
    flops = 4.0 * count * queries * heads * head_dim * seen
    return Op(f"attention {kind} {name}", f"{count}x{context}", moved, flops, make)


def _sampling(sizes: Sizes, device: torch.device) -> Iterator[Op]:
    for rows in sizes.rows:
        for filtered in (False, True):

            def make(rows: int = rows, filtered: bool = filtered) -> Callable[[], object]:
                logits = torch.randn(rows, sizes.vocab, device=device) * 3
                lines = torch.zeros(LOGIT_LINES, rows, dtype=torch.int32, device=device)
                lines[ROW] = torch.arange(rows)
                sampling, edits = SamplingRows.empty(rows, device), EditRows.empty(rows, 1, 1, device)
                sampling.temperature.fill_(1.0)
                sampling.top_p.fill_(0.9)
                sampling.kind.fill_(FILTERED if filtered else PLAIN)
                tokens = torch.zeros(rows, 1, dtype=torch.int32, device=device)

                def run() -> object:
                    return choose(logits, lines, sampling, edits, tokens, edited=None, filtered=filtered, logprobs=-1)

                return run

            name = "sample with filters" if filtered else "sample"
            yield Op(name, f"{rows}x{sizes.vocab}", rows * sizes.vocab * 4.0, 0.0, make)


def _experts(sizes: Sizes, device: torch.device) -> Iterator[Op]:
    count, slots, width, hidden = sizes.experts
    for scheme in ("bf16", "fp8", "int4", "MXFP4"):
        for tokens in sizes.expert_tokens:

            def make(scheme: str = scheme, tokens: int = tokens) -> Callable[[], object]:
                experts = TritonExperts()
                gate_up = experts.pack(weight(scheme, count * 2 * width, hidden, device), count, gated=True)
                down = experts.pack(weight(scheme, count * hidden, width, device), count)
                logits, x = torch.randn(tokens, count, device=device), _normal(device, tokens, hidden)

                def run() -> object:
                    return experts(x, experts.route(logits, slots, normalize=True), gate_up, down, "silu")

                return run

            each = 3.0 * width * hidden
            chosen = count * (1.0 - (1.0 - slots / count) ** tokens)  # the expected number
            moved = chosen * each * _bits(scheme) / 8 + tokens * hidden * 4
            flops = 2.0 * tokens * slots * each
            yield Op(f"experts {scheme}", f"{tokens} tokens", moved, flops, make, scheme == "fp8")
