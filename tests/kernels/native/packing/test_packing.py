"""Packing by rows, in any order and from several threads, gives the same bits; and the values that it holds."""

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.weights import BF16, GGUF_FORMATS, INT8, INT16, WeightFormat, held_as, int4_format, packed_bytes
from penstock.kernels import CannotQuantize, DensePacker, Needs, Platform, detect_platform, select_packing
from penstock.kernels.native.layout import Layout
from penstock.kernels.native.memory import ALIGNMENT, CHUNK, WeightMemory
from penstock.kernels.native.pack import pack
from penstock.kernels.native.packer import NativePacker
from penstock.kernels.native.packing import PackedWeight
from tests.kernels.native.reference import FROM_FLOATS, GROUPED, rows_of, words_of

NATIVE = bool(detect_platform().isa)
needs_native = pytest.mark.skipif(not NATIVE, reason="no native kernels for this machine")
STORED = (torch.float32, torch.bfloat16, torch.float16)


FORMATS = pytest.mark.parametrize("fmt", FROM_FLOATS.values(), ids=FROM_FLOATS)


class Case(NamedTuple):
    weight: Tensor
    gated: bool = False


def cases(seed: str) -> Iterator[Case]:
    """Odd sizes, all stored dtypes, weights from tiny to large, rows of zeros, and ties for the largest magnitude."""
    source = random.Random(seed)
    for number in range(60):
        generator = torch.Generator().manual_seed(number)
        gated = source.random() < 0.4
        n = source.choice((1, 2, 7, 8, 9, 15, 16, 17, 40, 53, 131)) * (2 if gated else 1)
        k = source.choice((1, 5, 31, 32, 33, 64, 72, 100, 128, 301, 576))
        weight = torch.randn(n, k, generator=generator) * 10 ** source.uniform(-9, 2)
        if number % 3 == 0:
            weight[source.randrange(n)] = 0.0
        if number % 4 == 0:
            weight = torch.randint(-3, 4, (n, k), generator=generator).float()
        yield Case(weight.to(STORED[number % 3]), gated)


def empty(case: Case, fmt: WeightFormat, experts: int = 1) -> NativePacker:
    n, k = case.weight.shape
    return NativePacker((n, k), fmt, gated=case.gated, memory=WeightMemory(), experts=experts)


def pieces(case: Case, seed: int = 1) -> list[tuple[int, Tensor]]:
    """The weight's rows cut anywhere, in any order."""
    source, n = random.Random(seed), len(case.weight)
    cuts = sorted({0, n, *(source.randrange(n + 1) for _ in range(4))})
    parts = [(a, case.weight[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    return source.sample(parts, len(parts))


def assert_same_bits(got: PackedWeight, want: PackedWeight) -> None:
    for field in ("n", "k", "format", "gated", "count"):
        assert getattr(got, field) == getattr(want, field)
    for ours, theirs in zip(got.tensors, want.tensors, strict=True):
        assert torch.equal(ours.view(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


@needs_native
@FORMATS
def test_rows_packed_one_by_one_are_those_of_a_weight_packed_at_once(fmt: WeightFormat) -> None:
    for case in cases(str(fmt)):
        packer = empty(case, fmt)
        for start, rows in pieces(case):
            packer.put(start, rows)
            rows.fill_(torch.nan)  # it may be overwritten
        want = pack(case.weight, None, fmt, gated=case.gated)
        assert_same_bits(packer.finish(), want)
        assert want.nbytes == packed_bytes(*case.weight.shape, fmt, gated=case.gated)


@needs_native
@pytest.mark.parametrize("scheme", ["f32", "bf16"])
def test_floats_are_kept(scheme: str) -> None:
    for case in cases(scheme):
        packed, k = pack(case.weight, None, FROM_FLOATS[scheme], gated=case.gated), case.weight.shape[1]
        kind, dtype = (np.uint32, torch.float32) if scheme == "f32" else (np.uint16, torch.bfloat16)
        words = words_of(packed).view(kind)
        want = case.weight.to(dtype)
        as_bits = want.view(torch.int32 if scheme == "f32" else torch.int16).numpy().view(kind)
        np.testing.assert_array_equal(words[:, :k], as_bits)
        assert not words[:, k:].any()


@needs_native
def test_int16_is_the_least_power_of_two_for_which_sums_fit() -> None:
    for case in cases("int16"):
        packed, k = pack(case.weight, None, INT16, gated=case.gated), case.weight.shape[1]
        values = words_of(packed).view(np.int16).astype(np.float64)
        assert packed.column_scales is not None and not values[:, k:].any()
        scales = packed.column_scales.numpy()[rows_of(packed)].astype(np.float64)
        dense = case.weight.double().numpy()
        spans = np.pad(dense, ((0, 0), (0, -k % 256))).reshape(len(dense), -1, 256)
        needed = np.maximum(np.sqrt((spans**2).sum(-1)).max(-1) / 46300, np.abs(dense).max(-1) / 32767)
        used = needed > 0
        assert (scales[~used] == 0).all()
        assert (np.frexp(scales[used])[0] == 0.5).all()
        assert (scales[used] >= needed[used]).all() and (scales[used] < 2.0001 * needed[used]).all()
        assert (np.abs(values[:, :k] * scales[:, None] - dense) <= 0.5 * scales[:, None]).all()


@needs_native
@FORMATS
def test_experts_are_packed_each_as_alone_one_behind_the_other(fmt: WeightFormat) -> None:
    for experts, n, k, gated in ((3, 2 * 9, 40, True), (4, 17, 33, False), (5, 64, 64, False), (2, 2 * 24, 300, True)):
        case = Case(torch.randn(experts * n, k, generator=torch.Generator().manual_seed(n)), gated)
        packer = empty(case, fmt, experts)
        for start, rows in pieces(case):  # cut anywhere: within an expert and across
            packer.put(start, rows)
        stack = packer.finish()
        assert_same_bits(stack, pack(case.weight, None, fmt, gated=gated, count=experts))
        assert stack.nbytes == experts * packed_bytes(n, k, fmt, gated=gated)
        for i, rows in enumerate(case.weight.split(n)):
            alone = pack(rows, None, fmt, gated=gated)
            for ours, theirs in zip(stack.tensors, alone.tensors, strict=True):
                mine = ours.view(-1).view(torch.uint8).view(experts, -1)[i]
                assert torch.equal(mine, theirs.reshape(-1).view(torch.uint8))


@needs_native
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("fmt", GROUPED.values(), ids=GROUPED)
def test_every_format_takes_what_is_planned(fmt: WeightFormat, gated: bool) -> None:
    for n, k in ((1, 1), (17, 40), (40, 576), (16, 256), (50, 1000)):
        n = 2 * n if gated else n
        packed = NativePacker((n, k), fmt, gated=gated, memory=WeightMemory()).finish()
        assert packed.nbytes == packed_bytes(n, k, fmt, gated=gated)


@pytest.mark.parametrize(("stored", "fmt"), GGUF_FORMATS.items())
def test_a_format_takes_little_more_than_the_blocks_of_a_file(stored: str, fmt: WeightFormat) -> None:
    """Codes of 2, 3, 5 and 6 bits are widened to 4 or 8."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]]
    in_file, in_memory = 8 * size / values, 8 * packed_bytes(1024, 2048, fmt) / (1024 * 2048)
    most = {"Q5_0": 1.6, "Q5_1": 1.6, "Q2_K": 2.2, "Q3_K": 1.4, "Q5_K": 1.6, "Q6_K": 1.4}.get(stored, 1.1)
    assert in_memory <= most * in_file


@needs_native
def test_a_row_of_int16_that_is_not_finite_holds_zeros() -> None:
    weight = torch.randn(20, 300, generator=torch.Generator().manual_seed(3))
    weight[1, 7], weight[17, 299] = torch.nan, -torch.inf
    packed = pack(weight, None, INT16)
    assert packed.column_scales is not None
    assert packed.column_scales[:20].isnan().nonzero().flatten().tolist() == [1, 17]
    assert not words_of(packed)[[1, 17]].any()


@needs_native
def test_several_threads_fill_one_weight() -> None:
    weight = torch.randn(2 * 1003, 200, generator=torch.Generator().manual_seed(1))
    case = Case(weight, True)
    for fmt in FROM_FLOATS.values():
        packer = empty(case, fmt)
        with ThreadPoolExecutor(4) as pool:  # pieces of 5 rows share blocks of 8
            list(pool.map(lambda start, p=packer: p.put(start, weight[start : start + 5]), range(0, len(weight), 5)))
        assert_same_bits(packer.finish(), pack(weight, None, fmt, gated=True))


@needs_native
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_rows_that_have_no_scale_are_counted(bad: float) -> None:
    weight = torch.ones(40, 64)
    weight[3, 5] = weight[17, 63] = bad
    for fmt in (INT8, int4_format(32)):
        with pytest.raises(ValueError, match=r"2 rows hold infinity or NaN.*--quantization none"):
            empty(Case(weight), fmt).put(0, weight)
        for large in (2e7, 1e30, 3e38):
            with pytest.raises(ValueError, match=r"1 rows .*too large"):
                empty(Case(weight), fmt).put(0, torch.tensor([[-large, large] * 32]))


@needs_native
@pytest.mark.parametrize(
    ("start", "rows"),
    [(0, torch.ones(3, 32)), (39, torch.ones(2, 64)), (-1, torch.ones(1, 64)), (0, torch.ones(64, 9).T)],
)
def test_rows_of_another_weight_are_refused(start: int, rows: Tensor) -> None:
    with pytest.raises(ValueError, match="do not belong to a weight"):
        empty(Case(torch.ones(40, 64)), INT8).put(start, rows)


def test_dense_rows_are_converted() -> None:
    weight = torch.randn(10, 7, dtype=torch.float32)
    packer = DensePacker((10, 7), torch.bfloat16)
    packer.put(4, weight[4:])
    packer.put(0, weight[:4])
    assert torch.equal(packer.finish(), weight.to(torch.bfloat16))


def test_rows_of_other_threads_reach_a_tensor_made_in_inference_mode() -> None:
    with torch.inference_mode():
        packer = DensePacker((4,), torch.float32)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(packer.put, 0, torch.arange(4)).result()
        assert packer.finish().tolist() == [0, 1, 2, 3]


def test_memory_is_aligned_and_taken_by_the_chunk() -> None:
    memory = WeightMemory()
    first, second = (memory.empty((3, 5), np.float16) for _ in range(2))
    assert first.shape == (3, 5) and first.dtype == np.float16
    assert second.ctypes.data - first.ctypes.data == ALIGNMENT
    large = memory.empty((CHUNK + 1,), np.uint8)
    assert {t.ctypes.data % ALIGNMENT for t in (first, second, large)} == {0} and len(large) == CHUNK + 1


@pytest.mark.parametrize(("n", "gated"), [(32, False), (17, False), (32, True), (2 * 9, True)])
def test_what_rows_fill_is_not_touched(n: int, gated: bool) -> None:
    """Memory becomes resident by its first write: by the threads that read rows, and not before."""
    for fmt in (*FROM_FLOATS.values(), *GROUPED.values()):
        parts = Layout(n, 64, fmt, gated).empty(lambda shape, dtype: np.full(shape, 1, dtype))
        for part in parts.values():
            if part is not None:
                assert part[:, :-1].all() and part[:, -1].any() == (n % 16 == 0)


@needs_native
def test_the_native_provider_packs_and_others_keep_tensors() -> None:
    packing = select_packing(detect_platform(), Needs(torch.bfloat16), "int4", 64)
    assert isinstance(packer := packing((32, 64), "matrix"), NativePacker)
    isa = detect_platform().isa
    assert packer.finish().format == held_as(int4_format(64), isa)
    assert packing((32, 64), "vocabulary").finish().format == held_as(INT8, isa)
    assert packing((32, 64), "gated").finish().gated
    assert packing((32, 64), "router").finish().format == BF16
    assert packing((32, 64), "gated", sections=[(32, (GGUF_FORMATS["Q4_K"],))]).finish().format == GROUPED["Q4_K"]
    assert packing((32, 64), "gated", 2).finish().count == 2
    for isa, fmt in (("avx2", INT16), ("avx512", INT16), ("avx512_bf16", BF16), ("amx", BF16)):
        packing = select_packing(Platform("cpu", "AVX2", isa), Needs(torch.bfloat16))
        assert packing((32, 64), "matrix").finish().format == packing((32, 64), "gated").finish().format == fmt
        assert packing((32, 64), "vocabulary").finish().format == packing((32, 64), "router").finish().format == BF16
    without = select_packing(Platform("cpu", "AVX2"), Needs(torch.bfloat16))((32, 64), "matrix").finish()
    assert isinstance(without, Tensor) and without.dtype == torch.bfloat16


def test_quantising_takes_native_kernels_and_a_dtype_of_theirs() -> None:
    with pytest.raises(CannotQuantize, match=r"--quantization int8 needs the native kernels.*C\+\+ compiler.* none$"):
        select_packing(Platform("cpu", "AVX2"), Needs(torch.bfloat16), "int8")
    with pytest.raises(CannotQuantize, match="do not compute in float16; set --dtype bfloat16"):
        select_packing(Platform("cpu", "AVX2", "avx2"), Needs(torch.float16), "int8")
