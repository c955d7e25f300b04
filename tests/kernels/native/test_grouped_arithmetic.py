"""Products with grouped weights have the bits of the plain arithmetic in reference.py, with every instruction set.

test_emulated.py runs this with the instruction sets that the processor lacks.
"""

import os
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.weights import WeightFormat
from penstock.kernels.linear import ACTIVATIONS
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.pack import with_bias
from penstock.kernels.native.packing import SectionedWeight
from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from tests.conftest import PROCESSORS
from tests.kernels.native.reference import GROUPED, JOINED, fma, product, quantized, random_weight, same_bits, unpacked

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")
# Emulated kernels are slow: only the best set, which is the emulated one.
EMULATED = "PENSTOCK_LIBRARY" in os.environ
SETS = [(isa, threads) for isa in instruction_sets()[: 1 if EMULATED else None] for threads in (1, 2)]
ROWS = (1, 2, 5, 8, 13, 40, 257)  # below and above the numbers that change tiles
# [n, k]: odd numbers of blocks and columns; k is part of a group, and long enough for several runs of lines.
SHAPES = ((53, 200), (16, 32), (40, 1100)) if EMULATED else ((53, 200), (16, 32), (1, 7), (72, 2600), (200, 576))


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values; some groups of a row are far larger than others, and some rows are zero."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 3, (shape[0], 1), generator=generator)
    x[:, shape[1] // 2 :] *= 1e-3
    x[3::7] = 0.0
    return x.to(dtype)


def on_every_set() -> Iterator[tuple[NativeLinear, str]]:
    """Native products with each instruction set and number of threads. The reference, which takes longer, is computed
    once for all."""
    for isa, threads in SETS:
        os.sched_setaffinity(0, PROCESSORS)  # the team before has left its maker on one
        team = ThreadTeam(isa, threads)
        yield NativeLinear(Session(team)), f"{isa}, {threads} threads"
        team.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", GROUPED.values(), ids=GROUPED)
def test_products_have_the_bits_of_the_reference(fmt: WeightFormat, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        weight, x = random_weight(fmt, n, k), drawn(max(ROWS), k, dtype=dtype)
        want = product(x.float().numpy(), weight)
        for linear, name in on_every_set():
            for rows in ROWS:
                assert same_bits(linear.logits(x[:rows].contiguous(), weight), want[:rows]), (name, n, k, rows)


@pytest.mark.parametrize("fmt", GROUPED.values(), ids=GROUPED)
def test_bias_and_residual_are_added_last(fmt: WeightFormat) -> None:
    n, k = 53, 200
    bias, residual = drawn(1, n)[0], drawn(13, n)
    weight, x = with_bias(random_weight(fmt, n, k), bias), drawn(13, k)
    want = product(x.numpy(), weight) + bias.numpy() + residual.numpy()
    for linear, name in on_every_set():
        for rows in (1, 13):
            assert same_bits(linear(x[:rows], weight, residual[:rows]), want[:rows]), (name, rows)


@pytest.mark.parametrize("names", JOINED, ids="+".join)
def test_sections_have_the_bits_of_their_own_formats(names: tuple[str, ...]) -> None:
    """Sections begin anywhere in a row, or at a whole vector of columns."""
    for sizes, k in (((19, 8, 26), 200), ((32, 48, 16), 576)):
        weights = [random_weight(GROUPED[name], n, k) for name, n in zip(names, sizes, strict=False)]
        n = sum(weight.n for weight in weights)
        bias, residual, x = drawn(1, n)[0], drawn(40, n), drawn(40, k)
        dense = np.concatenate([product(x.numpy(), weight) for weight in weights], 1)
        want = dense + bias.numpy() + residual.numpy()
        for linear, name in on_every_set():
            weight, with_a_bias = (linear.pack(SectionedWeight(tuple(weights)), each) for each in (None, bias))
            for rows in (1, 13, 40):
                assert same_bits(linear.logits(x[:rows], weight), dense[:rows]), (name, sizes, rows)
                assert same_bits(linear(x[:rows], with_a_bias, residual[:rows]), want[:rows]), (name, sizes, rows)


@pytest.mark.parametrize("fmt", GROUPED.values(), ids=GROUPED)
def test_gated_products_are_those_of_the_reference(fmt: WeightFormat) -> None:
    """The activation itself is an approximation; without one, the bits are the same."""
    for n, k in ((2 * 44, 160), (2 * 16, 96)):
        weight, x = random_weight(fmt, n, k, gated=True), drawn(40, k)
        dense = torch.from_numpy(product(x.numpy(), weight))
        most = dense.abs().amax(-1, keepdim=True).double()
        wants = {name: activation(dense.double()) for name, activation in ACTIVATIONS.items()}
        for linear, name in on_every_set():
            for rows in (1, 5, 40):
                for activation, want in wants.items():
                    scale = most * (most + (activation == "swiglu_oai")) + 1e-30  # which multiplies by up + 1
                    got = linear.gated(x[:rows], weight, activation).double()
                    assert ((got - want[:rows]) / scale[:rows]).abs().max() < 1e-6, (name, activation, rows)
                if n == 32:  # no padding: the columns are only in another order
                    blocks = dense[:rows].view(rows, 2, 2, 8).transpose(1, 2).reshape(rows, n)
                    assert same_bits(linear.logits(x[:rows], weight), blocks.numpy()), (name, rows)


@pytest.mark.parametrize("fmt", GROUPED.values(), ids=GROUPED)
def test_sums_of_the_largest_products_fit(fmt: WeightFormat) -> None:
    """All codes the largest or the least, and x of one sign or of both: no sum on the way may be cut off."""
    n, k = 32, 2 * max(fmt.group, 32)
    pairs = torch.arange(k) // 2 % 2 * 2.0 - 1.0
    signs = torch.stack([torch.ones(k), -torch.ones(k), pairs, -pairs, pairs.roll(1)])
    cases = []
    for byte in (0x00, 0xFF, 0x0F, 0x7F, 0x80):
        weight = random_weight(fmt, n, k)
        weight.lines.fill_(byte)
        cases.append((byte, weight, product(signs.numpy(), weight)))
    for linear, name in on_every_set():
        for byte, weight, want in cases:
            for rows in (1, 2, 5, 17):
                for row, one in zip(signs, want, strict=True):
                    got = linear.logits(row.expand(rows, k).contiguous(), weight)
                    assert same_bits(got, np.tile(one, (rows, 1))), (name, byte, rows)


def test_the_reference_is_close_to_the_product_of_the_values() -> None:
    """The rounding of x is the only difference: at most half of a scale for each value."""
    for fmt in GROUPED.values():
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
