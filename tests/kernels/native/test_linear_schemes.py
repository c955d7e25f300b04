"""Products with packed weights of every format: int16 against its arithmetic written out, and all of them whoever
shares the batch. For the arithmetic of grouped formats see test_grouped_arithmetic.py.

They run with the best instruction set of this processor; test_emulated.py runs them with the others.
"""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.weights import INT16
from penstock.kernels.linear import ACTIVATIONS
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.pack import pack
from penstock.kernels.native.packing import PackedWeight
from penstock.kernels.native.session import Session, native_session
from penstock.kernels.native.team import ThreadTeam
from tests.kernels.native.reference import FROM_FLOATS, GROUPED, random_weight, words_of

DRAWN = [name for name in GROUPED if name not in FROM_FLOATS]  # with random codes and scales
ROWS = (1, 2, 5, 6, 17, 33)  # below and above the numbers that change tiles
ALONE = (0, 1, 4, 15, 16, 31, 32)
MANY = 512
# Emulated kernels are slow: numbers of rows that change tiles, and their neighbours.
COUNTS = range(1, 301) if "PENSTOCK_LIBRARY" not in os.environ else (*range(1, 18), 33, 48, 49, 64, 65, 97, 145, 300)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed_values(weight: PackedWeight) -> Tensor:
    """The integers of an int16 weight, fp64 [n, k padded]."""
    return torch.from_numpy(words_of(weight).view(np.int16)).double()


@pytest.fixture(scope="module")
def linear() -> NativeLinear:
    return NativeLinear(native_session())


def aligned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole multiples of powers of two, one for each 256 values: fp64 [rows, k], and fp32 [rows, spans]."""
    spans = torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % 256)).view(len(x), -1, 256)
    room = torch.maximum(spans.abs().amax(-1) / 32767, spans.norm(dim=-1) / 46300)
    scales = torch.exp2(room.log2().ceil()).nan_to_num(neginf=1.0)
    return (spans / scales[..., None]).round().flatten(1)[:, : x.shape[-1]], scales.float()


def summed_by_spans(x: Tensor, weight: PackedWeight) -> Tensor:
    """The product of x and an int16 weight, to the bit: exact sums of 256 products each, which are added in fp32."""
    (values, scales), packed = aligned(x), packed_values(weight)[:, : x.shape[-1]]
    total = torch.zeros(len(x), weight.n)
    for i, each in enumerate(scales.T):
        whole = values[:, i * 256 : (i + 1) * 256] @ packed[:, i * 256 : (i + 1) * 256].T
        assert whole.abs().max() < 2**31
        total = total + whole.float() * each[:, None]
    assert weight.column_scales is not None
    return total * weight.column_scales[: weight.n]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 21])
def test_int16_adds_exact_sums_of_spans(linear: NativeLinear, rows: int, dtype: torch.dtype) -> None:
    for n, k in ((53, 200), (16, 256), (80, 1027), (33, 272)):
        x, weight = drawn(rows, k, dtype=dtype), pack(drawn(n, k), None, INT16)
        x[:, : k // 2] *= 1e-3
        assert torch.equal(linear.logits(x, weight), summed_by_spans(x, weight))


@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_int16_sums_of_the_largest_products(linear: NativeLinear, rows: int) -> None:
    """All of one size, a few among zeros, a single one: what would be the largest sum is one that fits."""
    k, n = 512, 32
    some = [torch.zeros(k) for _ in range(4)]
    for every, pattern in zip((1, 2, 31, 255), some, strict=True):
        pattern[::every] = 1.0
    patterns = torch.stack([*some, -some[0], some[1].roll(1), torch.arange(k) % 2 * 2.0 - 1.0, drawn(k).sign()])
    weight = pack(patterns.repeat(n // 8, 1), None, INT16)
    for pattern in (*patterns, *(1.4142 * patterns)):
        x = pattern.expand(rows, k).contiguous()
        assert torch.equal(linear.logits(x, weight), summed_by_spans(x, weight))


@pytest.mark.parametrize("outlier", [1.0, 30.0, 1000.0])
def test_int16_loses_far_less_than_bf16_has_lost(linear: NativeLinear, outlier: float) -> None:
    """Also beside a value that is much larger than its neighbours."""
    x, dense = drawn(64, 1024), drawn(160, 1024)
    x[:, 77] *= outlier
    exact = x.double() @ dense.double().T
    x, dense = x.to(torch.bfloat16), dense.to(torch.bfloat16)
    of_rounded = x.double() @ dense.double().T
    lost, ours = (of_rounded - exact).norm(), (linear.logits(x, pack(dense, None, INT16)) - of_rounded).norm()
    assert ours < lost / 8


@pytest.mark.parametrize("epilogue", ["", "silu", "logits"])
@pytest.mark.parametrize("scheme", [*FROM_FLOATS, *DRAWN])
def test_a_row_is_the_same_whoever_is_beside_it(linear: NativeLinear, scheme: str, epilogue: str) -> None:
    dtype = torch.float32 if scheme == "f32" else torch.bfloat16
    n, k = 104, 300  # an odd number of blocks, the last of them half full; a part of a tile or group along k
    gated = epilogue == "silu"
    if scheme in FROM_FLOATS:
        weight = pack(drawn(n, k, dtype=dtype), drawn(n, dtype=dtype), FROM_FLOATS[scheme], gated=gated)
    else:
        weight = random_weight(GROUPED[scheme], n, k, gated=gated)
    x, residual = drawn(max(ROWS), k, dtype=dtype), drawn(max(ROWS), n, dtype=dtype)
    team = ThreadTeam(native_session().team.isa, 2)
    of_all = []
    for product in (linear, NativeLinear(Session(team))):

        def multiply(rows: slice, product: NativeLinear = product) -> Tensor:
            if gated:
                return product.gated(x[rows], weight, epilogue)
            return product.logits(x[rows], weight) if epilogue else product(x[rows], weight, residual[rows])

        of_all.append(multiply(slice(None)))
        for row in ALONE:
            assert torch.equal(multiply(slice(row, row + 1)), of_all[-1][row : row + 1])
        for rows in ROWS:
            assert torch.equal(multiply(slice(rows)), of_all[-1][:rows])
            assert torch.equal(multiply(slice(max(ROWS) - rows, None)), of_all[-1][max(ROWS) - rows :])
    assert torch.equal(*of_all)
    team.close()


@pytest.mark.parametrize("scheme", [*FROM_FLOATS, *DRAWN])
def test_any_number_of_rows_gives_the_bits_of_many(linear: NativeLinear, scheme: str) -> None:
    n, k, dtype = 40, 136, torch.float32 if scheme == "f32" else torch.bfloat16
    packs = scheme in FROM_FLOATS
    weight = pack(drawn(n, k), None, FROM_FLOATS[scheme]) if packs else random_weight(GROUPED[scheme], n, k)
    x = drawn(MANY, k, dtype=dtype)
    want = linear.logits(x, weight)
    for rows in COUNTS:
        assert torch.equal(linear.logits(x[MANY - rows :], weight), want[MANY - rows :]), rows


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("rows", [1, 19])
def test_gated_integers(linear: NativeLinear, rows: int, activation: str) -> None:
    for scheme in ("int16", "int8", "int4-32", "int4-128"):
        n, k = 2 * 44, 160
        dense = drawn(n, k)
        plain, gated = (pack(dense, drawn(n), FROM_FLOATS[scheme], gated=gated) for gated in (False, True))
        x = drawn(rows, k)
        want = ACTIVATIONS[activation](linear.logits(x, plain))
        got = linear.gated(x, gated, activation)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def test_a_row_that_is_not_finite_spoils_itself_alone(linear: NativeLinear) -> None:
    integers = [pack(drawn(40, 96), None, fmt) for name, fmt in FROM_FLOATS.items() if name.startswith("int")]
    for weight in (*integers, *(random_weight(GROUPED[name], 40, 96) for name in DRAWN)):
        x = drawn(9, 96)
        clean = linear.logits(x, weight)
        x[3, 5], x[7, 95] = torch.inf, torch.nan
        spoiled = linear.logits(x, weight)
        assert not spoiled[[3, 7]].isfinite().any()
        others = [0, 1, 2, 4, 5, 6, 8]
        assert torch.equal(spoiled[others], clean[others])


def test_a_column_of_int16_that_is_not_finite_spoils_itself_alone(linear: NativeLinear) -> None:
    dense, x = drawn(40, 300), drawn(9, 300)
    clean = linear.logits(x, pack(dense, None, INT16))
    dense[3, 5], dense[17, 299] = torch.inf, torch.nan
    spoiled = linear.logits(x, pack(dense, None, INT16))
    assert spoiled[:, [3, 17]].isnan().all()
    others = [i for i in range(40) if i not in (3, 17)]
    assert torch.equal(spoiled[:, others], clean[:, others])


def test_int16_of_values_from_tiny_to_huge(linear: NativeLinear) -> None:
    for x_size, size in ((1e-25, 1e20), (1e25, 1e-20), (1e-40, 1.0), (1.0, 1e-40), (1e-20, 1e-20)):
        x, dense = drawn(3, 300) * x_size, drawn(20, 300) * size
        want = x.double() @ dense.double().T
        got = linear.logits(x, pack(dense, None, INT16)).double()
        assert (got - want).abs().max() <= 1e-3 * want.abs().max() + 1e-30
