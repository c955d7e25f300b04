"""Keys and values in int8: what is stored, and attention over it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import AttentionBatch
from penstock.kernels.attention import ReferenceAttention, unscaled
from penstock.kernels.native.attention import NativeAttention
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.session import native_session
from penstock.messages import Window

SIZE, KV_HEADS, GROUP, DIM = 16, 2, 3, 48
DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hadamard(dim: int) -> Tensor:
    """The matrix [dim, dim] that keys in int8 pages are multiplied by: Hadamard matrices (Sylvester's) of the largest
    order, a power of two, that divides `dim`. It is symmetric, and its square is that order times the identity."""
    matrix = torch.eye(dim // (dim & -dim))
    while len(matrix) < dim:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix


def spread(heads: Tensor) -> Tensor:
    return heads @ hadamard(DIM)


def dequantised(pages: Tensor, *, keys: bool) -> Tensor:
    """Int8 pages (see CacheOp in ops.h) as fp32 [blocks, kv_heads, size, dim]."""
    blocks = pages.shape[0]
    flat = pages.contiguous().view(blocks, KV_HEADS, -1)
    values, scales = flat[..., : SIZE * DIM], flat[..., SIZE * DIM :].contiguous().view(torch.float32)
    if keys:
        natural = values.reshape(blocks, KV_HEADS, DIM // 4, SIZE, 4).permute(0, 1, 3, 2, 4)
    else:
        natural = values.reshape(blocks, KV_HEADS, SIZE // 4, DIM, 4).transpose(-1, -2)
    values = natural.reshape(blocks, KV_HEADS, SIZE, DIM).float() * scales[..., None]
    return spread(values) / (DIM & -DIM) if keys else values


def stored(attention: NativeAttention, qkv: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """Stores keys and values at `slots` without rotation, and returns the queries."""
    heads = KV_HEADS * GROUP
    rotation = attention.rotation(torch.zeros(len(qkv), dtype=torch.int64), unscaled(torch.zeros(DIM // 2)), qkv.dtype)
    where = slots // SIZE, slots % SIZE
    return attention.store(qkv, heads, None, rotation, pages[:, 0], pages[:, 1], *where, 1e-6, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_rounded_to_127ths_of_its_largest_element(dtype: torch.dtype) -> None:
    attention, tokens = NativeAttention(native_session()), 37
    pages = torch.zeros(5, 2, KV_HEADS, SIZE, DIM + 4, dtype=torch.int8)
    qkv = normal(tokens, (KV_HEADS * (GROUP + 2)) * DIM).to(dtype)
    slots = torch.randperm(5 * SIZE, generator=torch.Generator().manual_seed(1))[:tokens]
    stored(attention, qkv, pages, slots)
    heads = qkv.float().view(tokens, -1, DIM)[:, KV_HEADS * GROUP :].unflatten(1, (2, KV_HEADS))
    for part, keys in ((0, True), (1, False)):
        got = dequantised(pages[:, part], keys=keys)[slots // SIZE, :, slots % SIZE]
        got, want = (spread(got), spread(heads[:, part])) if keys else (got, heads[:, part])
        scale = want.abs().amax(-1, keepdim=True) / 127
        torch.testing.assert_close(got / scale, (got / scale).round(), rtol=0.0, atol=1e-3)
        assert ((got - want).abs() <= scale * 0.51).all()


def test_a_large_element_of_keys_does_not_coarsen_the_others() -> None:
    """Keys of real models have some elements far larger than the rest."""
    attention, tokens, large = NativeAttention(native_session()), 32, 30.0
    pages = torch.zeros(2, 2, KV_HEADS, SIZE, DIM + 4, dtype=torch.int8)
    heads = normal(tokens, KV_HEADS * (GROUP + 2), DIM)
    heads[..., 5] = large
    stored(attention, heads.flatten(1), pages, torch.arange(tokens))
    errors = []
    for part, first in ((0, KV_HEADS * GROUP), (1, KV_HEADS * (GROUP + 1))):
        got = dequantised(pages[:, part], keys=part == 0).transpose(1, 2).flatten(0, 1)
        errors.append((got - heads[:, first : first + KV_HEADS]).square().mean().sqrt().item())
    of_keys, of_values = errors
    assert of_values == pytest.approx(large / 127 / 12**0.5, rel=0.1)
    assert of_keys < of_values / 2


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_over_the_rounded_keys_and_values(dtype: torch.dtype, window: int) -> None:
    attention = NativeAttention(native_session())
    lens = [(1, 1), (1, 71), (19, 19), (6, 90), (1, 600)]
    query_lens, context_lens = np.array(lens, np.int64).T
    blocks = 1 + len(lens) * -(-600 // SIZE)
    tables = 1 + np.random.default_rng(0).permutation(blocks - 1).reshape(len(lens), -1)
    # Garbage in unwritten places: attention must not see it.
    pages = torch.full((blocks, 2, KV_HEADS, SIZE, DIM + 4), -1, dtype=torch.int8)
    for i, (_, context) in enumerate(lens):
        at = np.arange(context)
        slots = torch.from_numpy(tables[i, at // SIZE] * SIZE + at % SIZE)
        stored(attention, normal(context, KV_HEADS * (GROUP + 2) * DIM, seed=i).to(dtype), pages, slots)
    start = np.concatenate([[0], np.cumsum(query_lens)])
    query = normal(int(start[-1]), KV_HEADS * GROUP, DIM, seed=9).to(dtype)
    batch = AttentionBatch(SIZE, Window(window), start, context_lens, tables)
    got = attention(query, pages[:, 0], pages[:, 1], attention.prepare(batch, pages[:, 0]), DIM**-0.5)
    keys, values = (dequantised(pages[:, part], keys=part == 0).nan_to_num() for part in (0, 1))
    reference = ReferenceAttention()
    want = reference(query.float(), keys, values, reference.prepare(batch, keys), DIM**-0.5)
    # Queries and weights are rounded to 16 bits.
    torch.testing.assert_close(got.float(), want, rtol=0.0, atol=2e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dim", [48, 64, 128])
def test_many_rows_have_the_bits_of_few(dim: int) -> None:
    """The end of a prompt at once, and one token at a time: with AMX by tiles and by vectors."""
    attention, context, tokens = NativeAttention(native_session()), 600, 40
    heads, blocks = KV_HEADS * GROUP, -(-context // SIZE)
    pages = torch.full((blocks, 2, KV_HEADS, SIZE, dim + 4), -1, dtype=torch.int8)
    rotation = attention.rotation(
        torch.zeros(context, dtype=torch.int64), unscaled(torch.zeros(dim // 2)), torch.bfloat16
    )
    at = torch.arange(context)
    qkv = normal(context, (heads + 2 * KV_HEADS) * dim).to(torch.bfloat16)
    attention.store(qkv, heads, None, rotation, pages[:, 0], pages[:, 1], at // SIZE, at % SIZE, 1e-6, 0.0)
    query = normal(tokens, heads, dim, seed=9).to(torch.bfloat16)

    def attend(first: int, count: int) -> Tensor:
        ends = np.array([context - tokens + first + count])
        batch = AttentionBatch(SIZE, Window(), np.array([0, count]), ends, np.arange(blocks)[None])
        prepared = attention.prepare(batch, pages[:, 0])
        return attention(query[first : first + count].contiguous(), pages[:, 0], pages[:, 1], prepared, dim**-0.5)

    assert torch.equal(attend(0, tokens), torch.cat([attend(i, 1) for i in range(tokens)]))
