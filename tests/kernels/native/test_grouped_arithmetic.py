"""Products with grouped weights have the bits of the plain arithmetic in reference.py, with every instruction set.

test_emulated.py runs this with the instruction sets that the processor lacks.
"""

import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.weights import BF16, WeightFormat
from penstock.kernels.linear import ACTIVATIONS
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.pack import pack, with_bias
from penstock.kernels.native.packing import PackedWeight, SectionedWeight
from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from tests.conftest import PROCESSORS
from tests.kernels.native.reference import (
    BEST,
    GROUPED,
    JOINED,
    PAIRS_OF_FLOATS,
    Floats,
    as_bf16,
    fma,
    grouped_formats,
    product,
    quantized,
    random_weight,
    same_bits,
    tile_sums,
    unpacked,
)

Formats = dict[str, WeightFormat]  # by name
Weights = tuple[PackedWeight, ...]
T = TypeVar("T")

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")
# Emulated kernels are slow: only the best set, which is the emulated one.
EMULATED = "PENSTOCK_LIBRARY" in os.environ
SETS = [(isa, threads) for isa in instruction_sets()[: 1 if EMULATED else None] for threads in (1, 2)]
tiles = pytest.mark.skipif(BEST != "amx", reason="this instruction set has no tiles")
NAMES = pytest.mark.parametrize("name", GROUPED)  # of formats
ROWS = (1, 2, 5, 8, 13, 40, 257)  # below and above the numbers that change tiles
DRAWN = 61  # rows: others are these again
# [n, k]: odd numbers of blocks and columns; k is part of a group, and long enough for several runs of lines.
SHAPES = ((53, 200), (16, 32), (40, 1100)) if EMULATED else ((53, 200), (16, 32), (1, 7), (72, 2600), (200, 576))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values; some groups of a row are far larger than others, and some rows are zero."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 3, (shape[0], 1), generator=generator)
    x[:, shape[1] // 2 :] *= 1e-3
    x[3::7] = 0.0
    return x.to(dtype)


def on_every_set(make: Callable[[Formats], T]) -> Iterator[tuple[NativeLinear, str, T]]:
    """Native products with each instruction set and number of threads, and what `make` makes of the set's formats. That
    includes the reference, which takes longer: it is made once for all sets that have the same formats."""
    made: dict[str, T] = {}
    for isa, threads in SETS:
        formats = grouped_formats(isa)
        key = str(formats)
        if key not in made:
            made[key] = make(formats)
        os.sched_setaffinity(0, PROCESSORS)  # the team before has left its maker on one
        team = ThreadTeam(isa, threads)
        yield NativeLinear(Session(team)), f"{isa}, {threads} threads", made[key]
        team.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@NAMES
def test_products_have_the_bits_of_the_reference(name: str, dtype: torch.dtype) -> None:
    at = np.arange(max(ROWS)) % DRAWN
    for n, k in SHAPES:
        x = drawn(DRAWN, k, dtype=dtype)

        def make(formats: Formats, shape: tuple[int, int] = (n, k), x: Tensor = x) -> tuple[PackedWeight, Floats]:
            weight = random_weight(formats[name], *shape)
            return weight, product(x.float().numpy(), weight)[at]

        for linear, where, (weight, want) in on_every_set(make):
            for rows in ROWS:
                assert same_bits(linear.logits(x[at[:rows]], weight), want[:rows]), (where, n, k, rows)


@NAMES
def test_bias_and_residual_are_added_last(name: str) -> None:
    n, k = 53, 200
    bias, residual, x = drawn(1, n)[0], drawn(13, n), drawn(13, k)

    def make(formats: Formats) -> tuple[PackedWeight, Floats]:
        weight = with_bias(random_weight(formats[name], n, k), bias)
        return weight, product(x.numpy(), weight) + bias.numpy() + residual.numpy()

    for linear, where, (weight, want) in on_every_set(make):
        for rows in (1, 13):
            assert same_bits(linear(x[:rows], weight, residual[:rows]), want[:rows]), (where, rows)


@pytest.mark.parametrize("names", JOINED, ids="+".join)
def test_sections_have_the_bits_of_their_own_formats(names: tuple[str, ...]) -> None:
    """Sections begin anywhere in a row, or at a whole vector of columns."""
    for sizes, k in (((19, 8, 26), 200), ((32, 48, 16), 576)):
        n = sum(sizes[: len(names)])
        bias, residual, x = drawn(1, n)[0], drawn(40, n), drawn(40, k)

        def make(formats: Formats, k: int = k, sizes: tuple[int, ...] = sizes, x: Tensor = x) -> tuple[Weights, Floats]:
            weights = tuple(random_weight(formats[name], n, k) for name, n in zip(names, sizes, strict=False))
            return weights, np.concatenate([product(x.numpy(), weight) for weight in weights], 1)

        for linear, name, (weights, dense) in on_every_set(make):
            want = dense + bias.numpy() + residual.numpy()
            weight, with_a_bias = (linear.pack(SectionedWeight(weights), each) for each in (None, bias))
            for rows in (1, 13, 40):
                assert same_bits(linear.logits(x[:rows], weight), dense[:rows]), (name, sizes, rows)
                assert same_bits(linear(x[:rows], with_a_bias, residual[:rows]), want[:rows]), (name, sizes, rows)


@NAMES
def test_gated_products_are_those_of_the_reference(name: str) -> None:
    """The activation itself is an approximation; without one, the bits are the same."""
    for n, k in ((2 * 44, 160), (2 * 16, 96)):
        x = drawn(40, k)

        def make(formats: Formats, shape: tuple[int, int] = (n, k), x: Tensor = x) -> tuple[PackedWeight, Tensor]:
            weight = random_weight(formats[name], *shape, gated=True)
            return weight, torch.from_numpy(product(x.numpy(), weight))

        for linear, where, (weight, dense) in on_every_set(make):
            most = dense.abs().amax(-1, keepdim=True).double()
            for rows in (1, 5, 40):
                for activation, function in ACTIVATIONS.items():
                    want = function(dense[:rows].double())
                    scale = most * (most + (activation == "swiglu_oai")) + 1e-30  # which multiplies by up + 1
                    got = linear.gated(x[:rows], weight, activation).double()
                    assert ((got - want) / scale[:rows]).abs().max() < 1e-6, (where, activation, rows)
                if n == 32:  # no padding: the columns are only in another order
                    blocks = dense[:rows].view(rows, 2, 2, 8).transpose(1, 2).reshape(rows, n)
                    assert same_bits(linear.logits(x[:rows], weight), blocks.numpy()), (where, rows)


@NAMES
def test_sums_of_the_largest_products_fit(name: str) -> None:
    """All codes the largest or the least, and x of one sign or of both: no sum on the way may be cut off."""
    n, k = 32, 2 * max(GROUPED[name].group, 32)
    pairs = torch.arange(k) // 2 % 2 * 2.0 - 1.0
    signs = torch.stack([torch.ones(k), -torch.ones(k), pairs, -pairs, pairs.roll(1)])

    def make(formats: Formats) -> list[tuple[int, PackedWeight, Floats]]:
        cases = []
        for byte in (0x00, 0xFF, 0x0F, 0x7F, 0x80):
            weight = random_weight(formats[name], n, k)
            weight.lines.fill_(byte)
            cases.append((byte, weight, product(signs.numpy(), weight)))
        return cases

    for linear, where, cases in on_every_set(make):
        for byte, weight, want in cases:
            for rows in (1, 2, 5, 17):
                for row, one in zip(signs, want, strict=True):
                    got = linear.logits(row.expand(rows, k).contiguous(), weight)
                    assert same_bits(got, np.tile(one, (rows, 1))), (where, byte, rows)


def of_all_sizes(rows: int, k: int, exponents: tuple[int, int]) -> Floats:
    random = np.random.default_rng(rows)
    sizes = 2.0 ** random.integers(*exponents, (rows, k))
    with np.errstate(over="ignore"):
        return (random.standard_normal((rows, k)) * sizes).astype(np.float32)


def same_where_finite(got: Tensor, want: Floats) -> bool:
    finite = np.isfinite(want)
    return np.array_equal(got.isfinite().numpy(), finite) and same_bits(got[torch.from_numpy(finite)], want[finite])


@tiles
def test_products_of_bf16_are_those_of_the_tile_instruction() -> None:
    """Numbers of all sizes, among them denormals and sums that overflow."""
    n, k, linear = 24, 200, NativeLinear(Session(ThreadTeam(BEST, 1)))
    for exponents in ((-3, 4), (-130, -110), (-70, -55), (40, 70), (-149, 128)):
        x, dense = (as_bf16(of_all_sizes(rows, k, exponents)) for rows in (33, n))
        for part in (x, dense):
            part[:, ::19] = 2.0**-130  # a denormal, which is taken for zero
        got = linear.logits(torch.from_numpy(x).bfloat16(), pack(torch.from_numpy(dense), None, BF16))
        x, dense = (np.pad(part, ((0, 0), (0, 24))) for part in (x, dense))
        assert same_where_finite(got, tile_sums(x, dense, PAIRS_OF_FLOATS)), exponents


@tiles
@pytest.mark.parametrize("exponents", [(-149, -130), (-120, -60), (-149, 63), (55, 64), (64, 127)], ids=str)
def test_codes_are_multiplied_with_numbers_of_all_sizes(exponents: tuple[int, int]) -> None:
    linear = NativeLinear(Session(ThreadTeam(BEST, 1)))
    for name in ("Q4_K", "Q6_K", "IQ4_NL"):
        weight, x = random_weight(GROUPED[name], 24, 200), of_all_sizes(33, 200, exponents)
        assert same_where_finite(linear.logits(torch.from_numpy(x), weight), product(x, weight)), name


def test_tiles_are_close_to_the_product_of_the_values() -> None:
    """x and weights are rounded to the 8 bits of bf16, and weights before that as fp16."""
    for name, fmt in grouped_formats("amx").items():
        weight, x = random_weight(fmt, 53, 200), drawn(13, 200).numpy()
        values = unpacked(weight).values().astype(np.float64)[:, :200]
        most = np.abs(unpacked(weight).values()).max(-1)  # widened codes err by a part of the largest
        size = np.abs(x).astype(np.float64) @ (np.abs(values) * 2.0**-7 + most[:, None] * 2.0**-9).T
        assert (np.abs(product(x, weight) - x.astype(np.float64) @ values.T) <= size + 1e-30).all(), name


def test_the_reference_is_close_to_the_product_of_the_values() -> None:
    """The rounding of x is the only difference: at most half of a scale for each value."""
    for fmt in grouped_formats("").values():
        weight, x = random_weight(fmt, 53, 200), drawn(13, 200).numpy()
        values = unpacked(weight).values().astype(np.float64)
        codes, scales = quantized(x, values.shape[1])
        assert np.abs(codes).max() == 127
        rounded = np.repeat(scales.astype(np.float64), 32, 1) * codes
        assert (np.abs(rounded[:, :200] - x) <= 0.5001 * np.repeat(scales, 32, 1)[:, :200]).all()
        size = np.abs(rounded) @ np.abs(values).T + 1e-30
        mins = 1.0 if unpacked(weight).mins is None else 40.0  # scale * code and minimum may cancel
        assert (np.abs(product(x, weight) - rounded @ values.T) <= mins * 1e-6 * size).all()


def test_fma_rounds_once() -> None:
    """Against exact integers of Python: a * b + c with c close to a tie of the product."""
    random = np.random.default_rng(1)
    a, b, c = (random.standard_normal(3000).astype(np.float32) for _ in range(3))
    c[:1000] = (a * b)[:1000]
    c[1000:2000] *= np.float32(2.0**-25) * (a * b)[1000:2000]
    for left, right, added, got in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(float(left)) * Fraction(float(right)) + Fraction(float(added))
        near = [np.nextafter(got, np.float32(way * np.inf)) for way in (-1, 1)]
        assert all(abs(Fraction(float(got)) - exact) <= abs(Fraction(float(other)) - exact) for other in near)
