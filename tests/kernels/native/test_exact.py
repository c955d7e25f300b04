"""A row's result is the same to the last bit whatever else is computed beside it, and on any number of threads."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels import AttentionBatch
from penstock.kernels.attention import unscaled
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.pack import pack
from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from penstock.messages import Window
from tests.kernels.native.reference import formats_from_floats, grouped_formats, random_weight

# Emulated kernels (see test_emulated.py) are slow: only the best set is tested, on smaller inputs of the same kinds.
EMULATED = "PENSTOCK_LIBRARY" in os.environ
if EMULATED:
    ISAS, THREADS = instruction_sets()[:1], (2,)
    SHAPES = ((torch.float32, (20, 300)), (torch.bfloat16, (40, 600)))
    CONTEXT, KV_HEADS, HEADS = 600, 1, 2
else:
    ISAS, THREADS = instruction_sets(), (1, 2, 3)
    SHAPES = ((torch.float32, (100, 200)), (torch.bfloat16, (328, 1056)))
    CONTEXT, KV_HEADS, HEADS = 1300, 2, 6
SETS = [(isa, threads) for isa in ISAS for threads in THREADS]
PAGES = (torch.float32, torch.bfloat16, torch.int8)
SCHEMES = ("f32", "bf16", "int16", "int8", "int4-32", "int4-128")
DRAWN = ("Q2_K", "Q3_K", "Q6_K", "IQ4_XS", "MXFP4", "Q4_0", "Q4_0+Q4_K")  # random codes and scales


def session(isa: str, threads: int) -> Session:
    return Session(ThreadTeam(isa, threads))


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES + DRAWN)
@pytest.mark.parametrize("isa", ISAS)
def test_a_product_does_not_depend_on_the_other_rows(isa: str, scheme: str) -> None:
    for dtype, (n, k) in SHAPES:
        if scheme in DRAWN:
            weight = random_weight(grouped_formats(isa)[scheme], n, k)
        else:
            fmt = formats_from_floats(isa)[scheme]
            weight = pack(normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype), fmt)
        most = 523  # more rows than are multiplied together
        x = normal(most, k, seed=3, dtype=dtype)
        one_thread = NativeLinear(session(isa, 1))
        alone = torch.cat([one_thread(row, weight) for row in x.split(1)])
        assert torch.equal(one_thread(x, weight), alone)
        for threads in THREADS:
            linear = NativeLinear(session(isa, threads))
            for row, result in zip(x[:40].split(1), alone.split(1), strict=False):  # slow with more than processors
                assert torch.equal(linear(row, weight), result)
            for rows in (2, 3, 5, 7, 13, 33, 70, 400, most):
                for part in (slice(rows), slice(most - rows, None)):
                    assert torch.equal(linear(x[part].contiguous(), weight), alone[part])


@pytest.mark.parametrize("pages_dtype", PAGES, ids=str)
@pytest.mark.parametrize(("isa", "threads"), SETS)
def test_attention_does_not_depend_on_how_a_prompt_was_cut(isa: str, threads: int, pages_dtype: torch.dtype) -> None:
    size, kv_heads, heads, dim, context = 16, KV_HEADS, HEADS, 48, CONTEXT
    dtype = torch.float32 if pages_dtype == torch.float32 else torch.bfloat16
    attention = NativeAttention(session(isa, threads))
    blocks = 1 + -(-context // size)
    table = 1 + np.random.default_rng(0).permutation(blocks - 1)[None]
    pages = torch.zeros(blocks, 2, kv_heads, size, dim + (4 if pages_dtype == torch.int8 else 0), dtype=pages_dtype)
    keys, values = pages[:, 0], pages[:, 1]
    qkv = normal(context, (heads + 2 * kv_heads) * dim, seed=4, dtype=dtype)
    positions, at = torch.arange(context), np.arange(context)
    rotation = attention.rotation(positions, unscaled(100.0 ** -torch.linspace(0, 1, dim // 2)), dtype)
    where: Any = torch.from_numpy(table[0, at // size]), torch.from_numpy(at % size)
    query = attention.store(qkv, heads, None, rotation, keys, values, *where, 1e-6, 0.0)

    def attend(first: int, last: int, window: Window) -> torch.Tensor:
        """Queries first to last, as the end of a context of `last` tokens."""
        start, lens = np.array([0, last - first]), np.array([last])
        prepared = attention.prepare(AttentionBatch(size, window, start, lens, table), keys)
        return attention(query[first:last].contiguous(), keys, values, prepared, dim**-0.5)

    sizes = context // 2 + 50, 300
    for window in (Window(), Window(sizes[0]), *(Window(tokens, chunked=True) for tokens in sizes)):
        whole = attend(0, context, window)
        assert torch.isfinite(whole).all()
        for cut in (1, 17, 512, 513, context - 200):
            assert torch.equal(torch.cat([attend(0, cut, window), attend(cut, context, window)]), whole)
        for one in (0, 511, 512, context - 276, context - 1):  # a single query's segments are shared among the threads
            assert torch.equal(attend(one, one + 1, window), whole[one : one + 1])


@pytest.mark.parametrize("pages_dtype", PAGES, ids=str)
@pytest.mark.parametrize(("isa", "threads"), SETS)
def test_attention_does_not_depend_on_the_other_sequences(isa: str, threads: int, pages_dtype: torch.dtype) -> None:
    """Other sequences change how many KV heads are computed together."""
    size, kv_heads, group, dim = 32, 12, 7, 16
    dtype = torch.float32 if pages_dtype == torch.float32 else torch.bfloat16
    attention = NativeAttention(session(isa, threads))
    lens = [(1, 40), (2, 33), (1, 1100), (1, 512), (17, 300), (1, 1), (1, 700), (1, 71), (1, 16)]
    query_lens, context_lens = np.array(lens, np.int64).T
    needed = -(-max(context_lens) // size)
    tables = np.random.default_rng(0).permutation(len(lens) * needed).reshape(len(lens), needed)
    width = dim + (4 if pages_dtype == torch.int8 else 0)
    pages = torch.zeros(len(lens) * needed, 2, kv_heads, size, width, dtype=pages_dtype)
    keys, values = pages[:, 0], pages[:, 1]
    heads = kv_heads * group
    for i, context in enumerate(context_lens.tolist()):
        at = np.arange(context)
        qkv = normal(context, (heads + 2 * kv_heads) * dim, seed=i, dtype=dtype)
        rotation = attention.rotation(torch.from_numpy(at), unscaled(torch.zeros(dim // 2)), dtype)
        where: Any = torch.from_numpy(tables[i, at // size]), torch.from_numpy(at % size)
        attention.store(qkv, heads, None, rotation, keys, values, *where, 1e-6, 0.0)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    query = normal(int(starts[-1]), heads, dim, seed=99, dtype=dtype)

    def attend(first: int, last: int) -> torch.Tensor:
        """Sequences first to last."""
        start = starts[first : last + 1]
        batch = AttentionBatch(size, Window(), start - start[0], context_lens[first:last], tables[first:last])
        rows = query[start[0] : start[-1]].contiguous()
        return attention(rows, keys, values, attention.prepare(batch, keys), dim**-0.5)

    together = attend(0, len(lens))
    assert torch.isfinite(together).all()
    assert torch.equal(torch.cat([attend(i, i + 1) for i in range(len(lens))]), together)
