"""Attention beyond the op's inputs: fp8 pages, padding, tables elsewhere, many sequences."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import AttentionBatch, ReferenceAttention, unscaled
from penstock.kernels.triton.attention import SPLIT_BELOW, TritonAttention
from penstock.kernels.triton.store import store
from penstock.messages import Window
from tests.kernels.triton.device import DEVICE, there

SIZE = 16

WHOLE = Window()


def make(
    lens: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, window: Window = WHOLE
) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """(query, keys, values, batch) for (queries, context) of each sequence; what nobody may look at is NaN."""
    generator = torch.Generator().manual_seed(5)
    query_lens, contexts = np.array(lens, np.int64).T
    widest = -(-int(contexts.max()) // SIZE)
    tables = 1 + np.random.default_rng(5).permutation(len(lens) * widest).reshape(len(lens), widest)
    pages = torch.full((1 + len(lens) * widest, 2, kv_heads, SIZE, head_dim), torch.nan)
    for table, context in zip(tables, contexts.tolist(), strict=True):
        for i, block in enumerate(table.tolist()):
            filled = min(max(context - i * SIZE, 0), SIZE)
            pages[block, :, :, :filled] = torch.randn(2, kv_heads, filled, head_dim, generator=generator)
    query = torch.randn(int(query_lens.sum()), heads, head_dim, generator=generator)
    start = np.concatenate([[0], np.cumsum(query_lens)])
    batch = AttentionBatch(SIZE, window, start, contexts, tables)
    for table, seen, context in zip(tables, batch.first_seen(), contexts, strict=True):
        table[: seen // SIZE] = table[-(-context // SIZE) :] = 10**9  # means nothing
    return query, pages[:, 0], pages[:, 1], batch


@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "head_dim", "window"),
    [
        ([(1, 70), (1, 1), (1, 130)], 6, 2, 64, WHOLE),  # split
        ([(1, 5 + 9 * i) for i in range(6)], 50, 25, 8, WHOLE),  # more programs than are split
        ([(40, 100), (1, 9), (3, 200), (1, 65)], 2, 1, 32, WHOLE),
        ([(1, 150), (70, 150)], 4, 4, 16, Window(37)),
        ([(1, 150), (70, 150), (1, 149), (1, 148)], 4, 2, 16, Window(37, chunked=True)),
        ([(1, 64), (1, 65), (40, 140)], 2, 1, 16, Window(64, chunked=True)),
    ],
)
def test_dense_attention_over_pages_of_which_only_what_is_seen_is_read(
    lens: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, window: Window
) -> None:
    query, keys, values, batch = make(lens, heads, kv_heads, head_dim, window)
    want = ReferenceAttention()(query, keys.nan_to_num(), values.nan_to_num(), batch, 0.3)
    attention = TritonAttention()
    q, k, v = there((query, keys, values))
    got = attention(q, k, v, attention.prepare(batch, k), 0.3).cpu()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_cases_cover_both_sides_of_splitting() -> None:
    assert SPLIT_BELOW // 2 >= 3 and SPLIT_BELOW // 25 < 6


def test_padding_gives_zeros_and_tables_may_hold_other_rows() -> None:
    query, keys, values, batch = make([(1, 70), (1, 20)], 4, 2, 16)
    want = ReferenceAttention()(query, keys.nan_to_num(), values.nan_to_num(), batch, 0.3)
    attention = TritonAttention()
    q, k, v = there((query, keys, values))
    prepared = attention.prepare(batch, k)
    # Rows 3 and 1 of tables of all rows; then two sequences that are none.
    tables = torch.full((5, prepared.tables.shape[1]), 10**6, dtype=torch.int32, device=DEVICE)
    tables[3], tables[1] = prepared.tables[0], prepared.tables[1]
    sequences = torch.tensor([[0, 1, 2, 3], [1, 1, 1, 1], [70, 20, 0, 0], [3, 1, 0, 0], [0] * 4], dtype=torch.int32)
    padded = replace(prepared, units=there(sequences), tables=tables, decodes=4)
    got = attention(torch.cat([q, q.new_full((2, 4, 16), 3.0)]), k, v, padded, 0.3).cpu()
    torch.testing.assert_close(got[:2], want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[2:], torch.zeros(2, 4, 16))


def fp8_pages(blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, with room for the scales behind each head's part of a block."""
    pages = torch.zeros(blocks, 2, kv_heads, SIZE, head_dim + 4, dtype=torch.uint8, device=DEVICE)
    pages = pages.view(torch.float8_e4m3fn)
    return pages[:, 0], pages[:, 1]


def dequantized(pages: Tensor, head_dim: int) -> Tensor:
    """fp32 [blocks, kv_heads, SIZE, head_dim]."""
    flat = pages.flatten(2).cpu()
    values, scales = flat[..., : SIZE * head_dim], flat[..., SIZE * head_dim :].contiguous().view(torch.float32)
    return values.float().unflatten(2, (SIZE, head_dim)) * scales[..., None]


def test_fp8_pages_are_written_with_a_scale_for_each_token_and_read_back() -> None:
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, head_dim, tokens = 6, 2, 48, 37
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).bfloat16()
    qkv[7] *= 1000.0
    weight = torch.rand(heads + kv_heads, head_dim, generator=generator).bfloat16() + 0.5
    positions, frequencies = torch.arange(tokens), unscaled(100.0 ** -torch.linspace(0, 1, head_dim // 2))
    slots = torch.randperm(5 * SIZE, generator=generator)[:tokens] + SIZE
    attention = TritonAttention()
    rotation = attention.rotation(*there((positions, frequencies)), torch.bfloat16)
    where = there((slots // SIZE, slots % SIZE))
    exact = torch.zeros(2, 7, kv_heads, SIZE, head_dim, dtype=torch.bfloat16, device=DEVICE)
    expected = store(there(qkv), heads, kv_heads, there(weight), rotation, exact[0], exact[1], *where, 1e-6, 0.0)
    keys, values = fp8_pages(7, kv_heads, head_dim)
    query = store(there(qkv), heads, kv_heads, there(weight), rotation, keys, values, *where, 1e-6, 0.0)
    assert torch.equal(query, expected)
    for got, want in zip((keys, values), exact, strict=True):
        wide = want.float().cpu()
        # Three bits of mantissa, of the largest of a token's head at the least.
        limit = wide.abs() / 16 + wide.abs().amax(-1, keepdim=True) / 448 / 2**9
        assert ((dequantized(got, head_dim) - wide).abs() <= limit).all()

    lens = np.array([20, 37])
    tables = np.array([[1, 2, 0], [3, 4, 5]])
    batch = AttentionBatch(SIZE, WHOLE, np.array([0, 1, 4]), lens, tables)
    q = query[:4].contiguous()
    got = attention(q, keys, values, attention.prepare(batch, keys), 0.2).cpu()
    pages = [dequantized(each, head_dim) for each in (keys, values)]
    want = ReferenceAttention()(q.cpu().float(), *pages, batch, 0.2)
    torch.testing.assert_close(got.float(), want, rtol=0.0, atol=0.02 * want.abs().max().item())


@pytest.mark.parametrize("heads", [2, 40])  # of one KV head: a tile takes pairs of values, or single ones
@pytest.mark.parametrize(("of_queries", "of_values"), [(1.0, 1.0), (3e5, 3e-4), (1e-7, 3e4)])
def test_fp8_pages_are_read_exactly_at_any_magnitude(heads: int, of_queries: float, of_values: float) -> None:
    """Scores are as large in each case. A value whose token has a scale of 0 counts as 0, not its weight."""
    generator = torch.Generator().manual_seed(4)
    keys, values = fp8_pages(20, 1, 64)
    for pages, size in ((keys, 1 / of_queries), (values, of_values)):
        raw = pages.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
        raw[(raw & 127) == 127] = 1  # no NaN
        scales = torch.rand(20, 1, SIZE, generator=generator) * size / 100
        pages.flatten(2)[..., SIZE * 64 :].view(torch.float32).copy_(scales)
    values.flatten(2)[3, 0, SIZE * 64 :].view(torch.float32)[:4] = 0.0
    lens = [(1, 100), (5, 120), (1, 4)]
    batch = AttentionBatch(
        SIZE,
        WHOLE,
        np.array([0, 1, 6, 7]),
        np.array([each[1] for each in lens]),
        np.array([[*range(1, 9)], [*range(9, 17)], [3] * 8]),
    )
    query = (torch.randn(7, heads, 64, generator=generator) * of_queries).bfloat16()
    attention, q = TritonAttention(), there(query)
    got = attention(q, keys, values, attention.prepare(batch, keys), 0.05).cpu().float() / of_values
    pages = [dequantized(each, 64) for each in (keys, values)]
    want = ReferenceAttention()(query.float(), *pages, batch, 0.05) / of_values
    assert want[:6].abs().amax() > 0.1 and not want[6].any()
    torch.testing.assert_close(got, want, rtol=2.0**-8, atol=2.0**-10 * want.abs().max().item())


def test_a_token_of_no_block_is_not_stored() -> None:
    qkv = torch.randn(3, 3 * 16, generator=torch.Generator().manual_seed(2))
    attention = TritonAttention()
    rotation = attention.rotation(*there((torch.arange(3), unscaled(torch.ones(8)))), torch.float32)
    pages = torch.zeros(2, 3, 1, SIZE, 16, device=DEVICE)
    blocks, offsets = there((torch.tensor([1, -1, 2]), torch.tensor([3, 3, 0])))
    attention.store(there(qkv), 1, None, rotation, pages[0], pages[1], blocks, offsets, 1e-6, 0.0)
    written = pages.cpu().abs().sum(-1)[:, :, 0].nonzero().tolist()
    assert written == [[0, 1, 3], [0, 2, 0], [1, 1, 3], [1, 2, 0]]
