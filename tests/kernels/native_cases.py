"""All that the native kernels can do, on small inputs of odd sizes: for a process of its own, which a fault may end.

    python -m tests.kernels.native_cases plain|guarded|short|overrun THREADS...

"plain" runs every case: with another build of the library, its sanitizer looks on. "guarded" runs each three times,
between forbidden pages as well (see guarded.py), which must give the same bits. "short" and "overrun" are to fail: the
kernels get less memory than they were told, guarded or not. A line names each case before it runs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.weights import Scheme
from penstock.kernels import OPS, AttentionBatch, Op
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.library import Engine, instruction_sets
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.moe import NativeExperts
from penstock.kernels.native.norm import NativeNorm
from penstock.kernels.native.packing import PackedWeight, pack, pack_stack
from penstock.kernels.native.session import Session
from penstock.runtime.sampler import Sampler
from tests.kernels.guarded import GuardedSession
from tests.runtime.test_sampler import some_choice

DTYPES = (torch.float32, torch.bfloat16)
MAKERS: dict[str, Callable[[Session], Any]] = {"rms_norm": NativeNorm, "store_kv": NativeAttention}
MAKERS |= {"paged_attention": NativeAttention, "route": NativeExperts}
Case = tuple[str, Callable[[Session], list[Tensor]]]


class Quantized(NativeLinear):
    """Whose weights are all packed in one scheme."""

    def __init__(self, session: Session, scheme: Scheme) -> None:
        super().__init__(session)
        self._scheme: Scheme = scheme

    def pack(self, weight: Tensor | PackedWeight, bias: Tensor | None = None, *, gated: bool = False) -> PackedWeight:
        assert isinstance(weight, Tensor)
        return pack(weight, bias, self._scheme, gated=gated)


class QuantizedExperts(NativeExperts):
    """The same for the matrices of experts."""

    def __init__(self, session: Session, scheme: Scheme) -> None:
        super().__init__(session)
        self._scheme: Scheme = scheme

    def pack(self, weight: Tensor | PackedWeight, count: int, *, gated: bool = False) -> PackedWeight:
        assert isinstance(weight, Tensor)
        return pack_stack(weight, count, self._scheme, gated=gated)


class Overrun(Session):
    """Which tells an op of one row more than there is."""

    def rows(self, tensor: Tensor) -> int:
        address = super().rows(tensor)
        self._rows.value += 1
        return address


def cases() -> Iterator[Case]:
    for op in OPS:
        for dtype in DTYPES:
            for i, arguments in enumerate(op.inputs(dtype, 0)):
                name = f"{op.name} {str(dtype)[6:]} {i}"
                if op.name in MAKERS:
                    yield name, _run(op, MAKERS[op.name], arguments)
                    continue
                plain, quantized = (NativeLinear, Quantized)
                if op.name == "experts":
                    plain, quantized = (NativeExperts, QuantizedExperts)
                yield name, _run(op, plain, arguments)
                for scheme in ("int16", "int8", "int4"):
                    yield f"{name} {scheme}", _run(op, lambda s, k=scheme, q=quantized: q(s, k), arguments)
    for dtype in DTYPES:
        yield f"int8 pages {str(dtype)[6:]}", _int8_pages(dtype)
    for vocab in (3, 257, 4112):
        yield f"sampling {vocab}", _sampling(vocab)


def _run(op: Op, make: Callable[[Session], Any], arguments: tuple[Any, ...]) -> Callable[[Session], list[Tensor]]:
    def run(session: Session) -> list[Tensor]:
        result = op.run(make(session), arguments)
        return [result] if isinstance(result, Tensor) else list(result)

    return run


def _int8_pages(dtype: torch.dtype) -> Callable[[Session], list[Tensor]]:
    """Prompts, chunks of them and decodes of several lengths, stored and attended to."""

    def run(session: Session) -> list[Tensor]:
        size, kv_heads, heads, dim = 16, 2, 6, 48
        attention, generator = NativeAttention(session), torch.Generator().manual_seed(0)
        query_lens, context_lens = np.array([(1, 1), (1, 71), (19, 19), (6, 90), (1, 600)], np.int64).T
        tables = 1 + np.random.default_rng(0).permutation(5 * 38).reshape(5, 38)
        pages = torch.zeros(1 + 5 * 38, 2, kv_heads, size, dim + 4, dtype=torch.int8)
        results = []
        for table, context in zip(tables, context_lens.tolist(), strict=True):
            at = np.arange(context)
            rotation = attention.rotation(torch.from_numpy(at), 100.0 ** -torch.linspace(0, 1, dim // 2), dtype)
            where: Any = torch.from_numpy(table[at // size]), torch.from_numpy(at % size)
            qkv = torch.randn(context, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
            weight = torch.ones(heads + kv_heads, dim, dtype=dtype)
            results.append(
                attention.store(qkv, heads, weight, rotation, pages[:, 0], pages[:, 1], *where, eps=1e-6, offset=0.0)
            )
        start = np.concatenate([[0], np.cumsum(query_lens)])
        query = torch.randn(int(start[-1]), heads, dim, generator=generator).to(dtype)
        for window in (0, 30):
            prepared = attention.prepare(AttentionBatch(size, window, start, context_lens, tables), pages[:, 0])
            results.append(attention(query, pages[:, 0], pages[:, 1], prepared, dim**-0.5))
        return [*results, pages]

    return run


def _sampling(vocab: int) -> Callable[[Session], list[Tensor]]:
    """Rows that want all there is, in turns."""

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


def main(way: str, threads: int, inputs: Sequence[Case]) -> None:
    for isa in instruction_sets():
        engine = Engine(isa, threads)
        short = 64 if way == "short" else 0
        guarded = () if way == "plain" else [GuardedSession(engine, at_end=end, short=short) for end in (True, False)]
        if way == "overrun":
            NativeNorm(Overrun(engine))(torch.ones(3, 72), None, torch.ones(72), 1e-6, 0.0)
            return
        for name, run in inputs:
            print(f"{isa}, {threads} threads: {name}", flush=True)
            results = run(Session(engine))
            for session in guarded:
                if not all(map(torch.equal, results, run(session))):
                    raise AssertionError(f"{name}: between forbidden pages the result is another")
    print("all right")


if __name__ == "__main__":
    drawn = tuple(cases())  # once for every instruction set and number of threads
    for count in sys.argv[2:]:
        main(sys.argv[1], int(count), drawn)
