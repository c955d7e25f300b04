"""Every native kernel on small inputs of odd sizes. Runs in a process of its own, which a fault may end.

    python -m tests.kernels.native.cases plain|guarded|whole|part THREADS... [SETS...]

SETS are instruction sets; without them all of this processor's run.
"plain" runs every case; with a sanitized build of the library (PENSTOCK_LIBRARY) the sanitizer checks them. "guarded"
runs each case three times, two of them between forbidden pages (see guarded.py), which must give the same bits. A line
names each case before it runs.

"whole" and "part" are controls that must fail. They run on the best instruction set only (PENSTOCK_ISA selects one),
first with tensors of the right size, then with one that is too short. "whole" reads past it with a load of a whole
vector, which the address sanitizer reports. "part" reads past it with a load of some lanes, between forbidden pages:
the sanitizer does not instrument AVX512's masked loads.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.weights import F32
from penstock.kernels import AttentionBatch
from penstock.kernels.attention import unscaled
from penstock.kernels.native.attention import NativeAttention, NativeLatentAttention
from penstock.kernels.native.linear import UNQUANTIZED, NativeLinear, Weight
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.moe import NativeExperts
from penstock.kernels.native.norm import NativeNorm
from penstock.kernels.native.pack import pack, with_bias
from penstock.kernels.native.packing import PackedWeight, SectionedWeight
from penstock.kernels.native.recurrence import NativeRecurrence
from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from penstock.messages import Window
from tests.kernels.native.guarded import GuardedSession
from tests.kernels.native.reference import GROUPED, formats_from_floats, grouped_formats, random_weight
from tests.kernels.op_cases import OPS, OpCase
from tests.runtime.sampling.samplers import Sampler
from tests.runtime.sampling.test_sampler import some_choice

DTYPES = (torch.float32, torch.bfloat16)
MAKERS: dict[str, Callable[[Session], Any]] = {"rms_norm": NativeNorm, "store_kv": NativeAttention}
MAKERS |= {"paged_attention": NativeAttention, "bidirectional_attention": NativeAttention, "route": NativeExperts}
MAKERS |= {"store_latents": NativeLatentAttention, "latent_attention": NativeLatentAttention}
MAKERS |= {"recurrence": NativeRecurrence, "sigmoid_gate": lambda session: NativeRecurrence(session).sigmoid_gate}
MAKERS |= {"product": lambda session: NativeRecurrence(session).product}
MAKERS["layer_norm"] = lambda session: NativeNorm(session).centered
RIGHT_SIZE = "ran on tensors of the right size"
Case = tuple[str, Callable[[Session], list[Tensor]]]


PACKED = ("int16", "int8", "int4-32")  # every case runs in these formats, and in one of all grouped formats
Pack = Callable[..., PackedWeight]


class Quantized(NativeLinear):
    """NativeLinear with all weights packed by a function of (weight, bias, gated, count), for an instruction set."""

    def __init__(self, session: Session, packing: Callable[[str], Pack]) -> None:
        super().__init__(session)
        self._packing = packing(session.team.isa)

    def pack(self, weight: Tensor | Weight, bias: Tensor | None = None, *, gated: bool = False) -> Weight:
        return self._packing(weight, bias, gated, 1)


class QuantizedExperts(NativeExperts):
    """NativeExperts with all matrices packed by a function, as in Quantized."""

    def __init__(self, session: Session, packing: Callable[[str], Pack]) -> None:
        super().__init__(session)
        self._packing = packing(session.team.isa)

    def pack(
        self, weight: Tensor | PackedWeight, count: int, bias: Tensor | None = None, *, gated: bool = False
    ) -> PackedWeight:
        return self._packing(weight, bias, gated, count)


def in_own_memory(weight: PackedWeight) -> PackedWeight:
    """The weight with a part of the heap for each tensor, whose ends the sanitizer knows: packed ones share chunks."""
    parts = {name: None if part is None else part.clone() for name, part in weight.parts.items()}
    return replace(weight, **parts)  # type: ignore[arg-type]


def from_floats(name: str, isa: str) -> Pack:
    """Packs the weight in a format, or as it is."""

    def packing(weight: Tensor, bias: Tensor | None, gated: bool, count: int) -> PackedWeight:
        fmt = formats_from_floats(isa)[name] if name else UNQUANTIZED[weight.dtype]
        return in_own_memory(pack(weight, bias, fmt, gated=gated, count=count))

    return packing


def drawn(name: str, isa: str) -> Pack:
    """Draws a weight of the same size, with codes and scales that a file may have."""
    fmt = grouped_formats(isa)[name]

    def packing(weight: Tensor, bias: Tensor | None, gated: bool, count: int) -> PackedWeight:
        n, k = weight.shape
        packed = random_weight(fmt, n // count, k, gated=gated, count=count)
        return packed if bias is None else with_bias(packed, bias)

    return packing


def cases() -> Iterator[Case]:
    formats = itertools.cycle(GROUPED)
    for op in OPS:
        for dtype in DTYPES:
            for i, arguments in enumerate(op.inputs(dtype, 0)):
                name = f"{op.name} {str(dtype)[6:]} {i}"
                if op.name in MAKERS:
                    yield name, _run(op, MAKERS[op.name], arguments)
                    continue
                make = QuantizedExperts if op.name.endswith("experts") else Quantized
                other = next(formats)
                packings = {f" {scheme}".rstrip(): partial(from_floats, scheme) for scheme in ("", *PACKED)}
                packings |= {f" drawn {other}": partial(drawn, other)}
                for scheme, packing in packings.items():
                    yield f"{name}{scheme}", _run(op, lambda s, p=packing, m=make: m(s, p), arguments)
    for dtype in DTYPES:
        yield f"sections {str(dtype)[6:]}", _sections(dtype)
        yield f"int8 pages {str(dtype)[6:]}", _int8_pages(dtype)
    for vocab in (3, 257, 4112):
        yield f"sampling {vocab}", _sampling(vocab)


def _run(op: OpCase, make: Callable[[Session], Any], arguments: tuple[Any, ...]) -> Callable[[Session], list[Tensor]]:
    def run(session: Session) -> list[Tensor]:
        result = op.run(make(session), arguments)
        return [result] if isinstance(result, Tensor) else list(result)

    return run


def _sections(dtype: torch.dtype) -> Callable[[Session], list[Tensor]]:
    """A product with a weight of several formats, which begin within a vector of columns."""

    def run(session: Session) -> list[Tensor]:
        formats = grouped_formats(session.team.isa)
        names = ("Q4_K", "Q6_K", "Q8_0")
        weights = [random_weight(formats[name], n, 200) for name, n in zip(names, (19, 32, 5), strict=True)]
        generator = torch.Generator().manual_seed(0)
        bias, x, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in (56, (13, 200), (13, 56)))
        linear = NativeLinear(session)
        weight = linear.pack(SectionedWeight(tuple(weights)), bias)
        return [linear(x[:rows], weight, residual[:rows]) for rows in (0, 1, 13)]

    return run


def _int8_pages(dtype: torch.dtype) -> Callable[[Session], list[Tensor]]:
    """Stores and attends to prompts, chunks and decodes of several lengths."""

    def run(session: Session) -> list[Tensor]:
        size, kv_heads, heads, dim = 16, 2, 6, 48
        attention, generator = NativeAttention(session), torch.Generator().manual_seed(0)
        query_lens, context_lens = np.array([(1, 1), (1, 71), (19, 19), (6, 90), (1, 600)], np.int64).T
        tables = 1 + np.random.default_rng(0).permutation(5 * 38).reshape(5, 38)
        pages = torch.zeros(1 + 5 * 38, 2, kv_heads, size, dim + 4, dtype=torch.int8)
        results = []
        for table, context in zip(tables, context_lens.tolist(), strict=True):
            at = np.arange(context)
            rotation = attention.rotation(
                torch.from_numpy(at), unscaled(100.0 ** -torch.linspace(0, 1, dim // 2)), dtype
            )
            where: Any = torch.from_numpy(table[at // size]), torch.from_numpy(at % size)
            qkv = torch.randn(context, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
            weight = torch.ones(heads + kv_heads, dim, dtype=dtype)
            results.append(
                attention.store(qkv, heads, weight, rotation, pages[:, 0], pages[:, 1], *where, eps=1e-6, offset=0.0)
            )
        start = np.concatenate([[0], np.cumsum(query_lens)])
        query = torch.randn(int(start[-1]), heads, dim, generator=generator).to(dtype)
        for window in (Window(), Window(30), Window(30, chunked=True)):
            prepared = attention.prepare(AttentionBatch(size, window, start, context_lens, tables), pages[:, 0])
            results.append(attention(query, pages[:, 0], pages[:, 1], prepared, dim**-0.5))
        return [*results, pages]

    return run


def _sampling(vocab: int) -> Callable[[Session], list[Tensor]]:
    """Rows that use every sampling parameter, one after the other."""

    def run(session: Session) -> list[Tensor]:
        random, rows = np.random.default_rng(vocab), 9
        choices = [some_choice(random, vocab) for _ in range(rows)]
        sampler = Sampler(vocab, rows, session)
        for row, choice in enumerate(choices):
            choice.add_to(sampler, row)
        results = []
        for first in (0, 0, 5):
            logits = torch.from_numpy(random.standard_normal((rows - first, vocab)).astype(np.float32) * 3)
            sampled = sampler.sample(logits, range(first, rows))
            packed = b"".join(sampled.logprobs)
            results += [torch.tensor(sampled.token_ids), torch.tensor(list(packed), dtype=torch.uint8)]
        return results

    return run


def overrun_whole_vectors(team: ThreadTeam) -> None:
    """A product whose weight has 16 columns fewer than it says: the kernel reads their lines."""
    linear, weight = NativeLinear(Session(team)), in_own_memory(pack(torch.ones(16, 72), None, F32))
    linear(torch.ones(3, 72), weight)
    print(RIGHT_SIZE, flush=True)
    linear(torch.ones(3, 72), replace(weight, n=32))


def overrun_part_of_a_vector(team: ThreadTeam) -> None:
    """A norm of 24 columns: a whole vector, and 8 lanes of another, whose last lane has one byte in a forbidden
    page."""
    for short in (0, 1):
        session = GuardedSession(team, at_end=True, short={"x": short})
        NativeNorm(session)(torch.ones(1, 24), None, torch.ones(24), 1e-6, 0.0)
        print(RIGHT_SIZE, flush=True)


CONTROLS = {"whole": overrun_whole_vectors, "part": overrun_part_of_a_vector}


def main(way: str, threads: int, sets: Sequence[str], inputs: Sequence[Case]) -> None:
    for isa in sets:
        team = ThreadTeam(isa, threads)
        guarded = () if way == "plain" else [GuardedSession(team, at_end=end) for end in (True, False)]
        for name, run in inputs:
            print(f"{isa}, {threads} threads: {name}", flush=True)
            results = run(Session(team))
            for session in guarded:
                if not all(map(torch.equal, results, run(session))):
                    raise AssertionError(f"{name}: between forbidden pages the result is another")
    print("all right")


if __name__ == "__main__":
    way, counts = sys.argv[1], [int(each) for each in sys.argv[2:] if each.isdigit()]
    sets = [each for each in sys.argv[2:] if not each.isdigit()] or instruction_sets()
    if way in CONTROLS:
        CONTROLS[way](ThreadTeam(instruction_sets()[0], counts[0]))
    else:
        drawn = tuple(cases())  # once, for all instruction sets and numbers of threads
        for count in counts:
            main(way, count, sets, drawn)
