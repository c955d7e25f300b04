"""Packing by rows, in any order and from several threads, gives the bits of the reference; and the values it holds."""

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.weights import Scheme, packed_bytes
from penstock.kernels import CannotQuantize, DensePacker, Needs, Platform, detect_platform, select_packing
from penstock.kernels.native.layout import Layout
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.memory import ALIGNMENT, CHUNK, WeightMemory
from penstock.kernels.native.packer import NativePacker
from penstock.kernels.native.packing import PackedWeight, pack, pack_stack
from penstock.kernels.native.session import native_session

NATIVE = bool(detect_platform().isa)
needs_native = pytest.mark.skipif(not NATIVE, reason="no native kernels for this machine")
STORED = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    weight: Tensor
    group: int
    gated: bool


def cases(scheme: Scheme, seed: int = 0) -> Iterator[Case]:
    """Odd sizes, all stored dtypes, weights from tiny to large, rows of zeros, and ties for the largest magnitude."""
    source = random.Random(f"{scheme}{seed}")
    for number in range(60):
        generator = torch.Generator().manual_seed(number)
        gated = source.random() < 0.4
        n = source.choice((1, 2, 7, 8, 9, 15, 16, 17, 40, 53, 131)) * (2 if gated else 1)
        k = source.choice((1, 5, 31, 32, 33, 64, 72, 100, 128, 301))
        weight = torch.randn(n, k, generator=generator) * 10 ** source.uniform(-9, 2)
        if number % 3 == 0:
            weight[source.randrange(n)] = 0.0
        if number % 4 == 0:
            weight = torch.randint(-3, 4, (n, k), generator=generator).float()
        yield Case(weight.to(STORED[number % 3]), source.choice((32, 64, 128)), gated)


def empty(case: Case, scheme: Scheme) -> NativePacker:
    n, k = case.weight.shape
    return NativePacker((n, k), scheme, case.group, gated=case.gated, memory=WeightMemory())


def pieces(case: Case, seed: int = 1) -> list[tuple[int, Tensor]]:
    """The weight's rows cut anywhere, in any order."""
    source, n = random.Random(seed), len(case.weight)
    cuts = sorted({0, n, *(source.randrange(n + 1) for _ in range(4))})
    parts = [(a, case.weight[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    return source.sample(parts, len(parts))


def assert_same_bits(got: PackedWeight, want: PackedWeight) -> None:
    for field in ("n", "k", "scheme", "group", "gated", "count"):
        assert getattr(got, field) == getattr(want, field)
    for ours, theirs in zip(got.tensors, want.tensors, strict=True):
        assert torch.equal(ours.view(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


@needs_native
@pytest.mark.parametrize("scheme", ["f32", "bf16", "int16", "int8", "int4"])
def test_rows_packed_one_by_one_are_those_of_the_reference(scheme: Scheme) -> None:
    for case in cases(scheme):
        packer = empty(case, scheme)
        for start, rows in pieces(case):
            packer.put(start, rows)
            rows.fill_(torch.nan)  # it may be overwritten
        want = pack(case.weight, None, scheme, group=case.group, gated=case.gated)
        assert_same_bits(packer.finish(), want)
        assert want.nbytes == packed_bytes(*case.weight.shape, scheme, case.group, gated=case.gated)


@needs_native
@pytest.mark.parametrize("scheme", ["f32", "bf16", "int16", "int8", "int4"])
def test_experts_are_packed_each_as_alone_one_behind_the_other(scheme: Scheme) -> None:
    for experts, n, k, gated in ((3, 2 * 9, 40, True), (4, 17, 33, False), (5, 64, 64, False), (2, 2 * 24, 70, True)):
        case = Case(torch.randn(experts * n, k, generator=torch.Generator().manual_seed(n)), 32, gated)
        packer = NativePacker((experts * n, k), scheme, 32, gated=gated, memory=WeightMemory(), experts=experts)
        for start, rows in pieces(case):  # cut anywhere: within an expert and across
            packer.put(start, rows)
        stack = packer.finish()
        assert_same_bits(stack, pack_stack(case.weight, experts, scheme, gated=gated))
        assert stack.nbytes == experts * packed_bytes(n, k, scheme, 32, gated=gated)
        for i, rows in enumerate(case.weight.split(n)):
            alone = pack(rows, None, scheme, gated=gated)
            for ours, theirs in zip(stack.tensors, alone.tensors, strict=True):
                mine = ours.view(-1).view(torch.uint8).view(experts, -1)[i]
                assert torch.equal(mine, theirs.reshape(-1).view(torch.uint8))


@needs_native
def test_a_row_of_int16_that_is_not_finite_holds_zeros() -> None:
    weight = torch.randn(20, 300, generator=torch.Generator().manual_seed(3))
    weight[1, 7], weight[17, 299] = torch.nan, -torch.inf
    packer = empty(Case(weight, 32, False), "int16")
    packer.put(0, weight)
    packed = packer.finish()
    assert_same_bits(packed, pack(weight, None, "int16"))
    assert packed.column_scales is not None and packed.column_scales[:20].isnan().nonzero().flatten().tolist() == [
        1,
        17,
    ]


@needs_native
def test_several_threads_fill_one_weight() -> None:
    weight = torch.randn(2 * 1003, 200, generator=torch.Generator().manual_seed(1))
    case = Case(weight, 32, True)
    for scheme in ("bf16", "int16", "int8", "int4"):
        packer = empty(case, scheme)
        with ThreadPoolExecutor(4) as pool:  # pieces of 5 rows share blocks of 8
            list(pool.map(lambda start, p=packer: p.put(start, weight[start : start + 5]), range(0, len(weight), 5)))
        assert_same_bits(packer.finish(), pack(weight, None, scheme, gated=True))


@needs_native
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_what_is_packed_is_the_nearest_of_its_grid(scheme: Scheme, stored: torch.dtype) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(2)).to(stored)
    packer = empty(Case(weight, 32, False), scheme)
    packer.put(0, weight)
    packed = packer.finish()
    got = NativeLinear(native_session()).rows(torch.arange(24), packed, 1.0, torch.float32)
    groups = weight.float().view(24, -1, 96 if scheme == "int8" else 32)
    if scheme == "int8":
        assert packed.column_scales is not None
        spacing = packed.column_scales[:24].view(-1, 1, 1)
    else:
        spacing = groups.abs().amax(-1, keepdim=True) / 8
    # Half a step; int4's largest value of the other sign lies a whole one from -8's opposite. fp16 rounds the scale.
    error = (got.view_as(groups) - groups).abs() / spacing
    assert error.max() <= (0.5001 if scheme == "int8" else 1.01)
    assert error.mean() <= 0.27


@needs_native
@pytest.mark.parametrize("stored", STORED)
def test_what_is_summed_in_16_bits_fits_and_no_scale_is_larger_than_that_takes(stored: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    spread = torch.randn(40, 256, generator=generator)
    one_sign = torch.rand(40, 256, generator=generator)
    rare = torch.randn(40, 256, generator=generator) * 0.01 + 5.0 * (torch.arange(256) == 77)
    for weight in (spread, one_sign, -one_sign, rare, torch.ones(40, 256)):
        packer = empty(Case(weight.to(stored), 32, False), "int8")
        packer.put(0, weight.to(stored))
        packed = packer.finish()
        assert packed.column_scales is not None and packed.column_sums is not None
        rows = NativeLinear(native_session()).rows(torch.arange(40), packed, 1.0, torch.float32)
        values = (rows / packed.column_scales[:40, None]).round()
        assert torch.equal(values.sum(-1).int(), packed.column_sums[:40])
        fours = torch.stack((values.view(40, -1, 2, 4)[..., :2], values.view(40, -1, 2, 4)[..., 2:]), 2).flatten(3)
        most = torch.maximum(fours.clamp_min(0).sum(-1), (-fours).clamp_min(0).sum(-1)).flatten(1).amax(-1)
        assert most.max() <= 128
        assert ((most >= 124) | (values.abs().amax(-1) == 127)).all()


@needs_native
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_rows_that_have_no_scale_are_counted(bad: float) -> None:
    weight = torch.ones(40, 64)
    weight[3, 5] = weight[17, 63] = bad
    for scheme in ("int8", "int4"):
        with pytest.raises(ValueError, match=r"2 rows hold infinity or NaN.*--quantization none"):
            empty(Case(weight, 32, False), scheme).put(0, weight)
    with pytest.raises(ValueError, match="too large"):
        empty(Case(weight, 32, False), "int4").put(0, torch.full((1, 64), 1e9))


@needs_native
@pytest.mark.parametrize(
    ("start", "rows"),
    [(0, torch.ones(3, 32)), (39, torch.ones(2, 64)), (-1, torch.ones(1, 64)), (0, torch.ones(64, 9).T)],
)
def test_rows_of_another_weight_are_refused(start: int, rows: Tensor) -> None:
    with pytest.raises(ValueError, match="do not belong to a weight"):
        empty(Case(torch.ones(40, 64), 32, False), "int8").put(start, rows)


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
    for scheme in ("f32", "bf16", "int16", "int8", "int4"):
        parts = Layout(n, 64, scheme, 32, gated).empty(lambda shape, dtype: np.full(shape, 1, dtype))
        for part in parts.values():
            if part is not None:
                assert part[:, :-1].all() and part[:, -1].any() == (n % 16 == 0)


@needs_native
def test_the_native_provider_packs_and_others_keep_tensors() -> None:
    packing = select_packing(detect_platform(), Needs(torch.bfloat16), "int4", 64)
    assert isinstance(packer := packing((32, 64), "matrix"), NativePacker)
    assert (packer.finish().scheme, packer.finish().group) == ("int4", 64)
    assert packing((32, 64), "vocabulary").finish().scheme == "int8"
    assert packing((32, 64), "gated").finish().gated
    assert packing((32, 64), "router").finish().scheme == "bf16"
    assert packing((32, 64), "gated", 2).finish().count == 2
    for isa, scheme in (("avx2", "int16"), ("avx512", "int16"), ("amx", "bf16")):
        packing = select_packing(Platform("cpu", "AVX2", isa), Needs(torch.bfloat16))
        assert packing((32, 64), "matrix").finish().scheme == packing((32, 64), "gated").finish().scheme == scheme
        assert packing((32, 64), "vocabulary").finish().scheme == packing((32, 64), "router").finish().scheme == "bf16"
    without = select_packing(Platform("cpu", "AVX2"), Needs(torch.bfloat16))((32, 64), "matrix").finish()
    assert isinstance(without, Tensor) and without.dtype == torch.bfloat16


def test_quantising_takes_native_kernels_and_a_dtype_of_theirs() -> None:
    with pytest.raises(CannotQuantize, match=r"--quantization int8 needs the native kernels.*C\+\+ compiler.* none$"):
        select_packing(Platform("cpu", "AVX2"), Needs(torch.bfloat16), "int8")
    with pytest.raises(CannotQuantize, match="do not compute in float16; set --dtype bfloat16"):
        select_packing(Platform("cpu", "AVX2", "avx2"), Needs(torch.float16), "int8")
