"""The codes, scales and minima that floats are quantised to, against bounds and a plain search."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.config.weights import INT8, SUPER, WeightFormat, held_as, int4_format
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.pack import pack
from tests.kernels.native.reference import Grouped, unpacked

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")
Rows = NDArray[np.float32]
INT8S = [INT8, held_as(INT8, "amx")]
INT4S = [held_as(int4_format(group), isa) for isa in ("", "amx") for group in (32, 64, 128)]
INT4 = pytest.mark.parametrize("fmt", INT4S, ids=str)
LEAST_HALF = 2.0**-24  # the smallest fp16 number: also its spacing up to 2^-14


def quantized(rows: Rows, fmt: WeightFormat) -> Grouped:
    """Codes, scales and minima, all multiplied by the power of their column."""
    got = unpacked(pack(torch.from_numpy(rows), None, fmt))
    powers = got.powers[:, None]
    mins = None if got.mins is None else got.mins * powers
    return replace(got, scales=got.scales * powers, mins=mins, powers=np.ones_like(got.powers))


def rounded(factors: NDArray[Any], fmt: WeightFormat) -> NDArray[np.float64]:
    """As fp16, or by column to its 11 bits."""
    if fmt.scales != "by_column":
        return factors.astype(np.float16).astype(np.float64)
    fraction, exponent = np.frexp(factors.astype(np.float64))
    return np.ldexp(np.rint(fraction * 2**11), exponent - 11)


def padded(rows: Rows, fmt: WeightFormat) -> NDArray[np.float64]:
    k = rows.shape[1]
    return np.pad(rows, ((0, 0), (0, fmt.padded_width(k) - k))).astype(np.float64)


def drawn(rows: int, k: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


def kinds_of_rows(k: int) -> Iterator[Rows]:
    """Normal values, of one sign, with a few large ones, sizes that differ from group to group, few distinct values."""
    rows = drawn(40, k)
    yield rows
    yield np.abs(rows) + 3.0
    yield rows * np.where(np.random.default_rng(1).random(rows.shape) < 0.01, 30, 1).astype(np.float32)
    yield rows * 10.0 ** np.random.default_rng(2).uniform(-2, 2, (40, k)).astype(np.float32)
    yield np.rint(rows).astype(np.float32)
    yield rows * np.float32(1e4)


@pytest.mark.parametrize("fmt", INT8S, ids=str)
@pytest.mark.parametrize("k", [32, 40, 576, 1000])
def test_int8_is_the_nearest_multiple_of_a_scale_of_fp16(k: int, fmt: WeightFormat) -> None:
    for rows in (*kinds_of_rows(k), drawn(40, k) * np.float32(1e-5)):
        got, want = quantized(rows, fmt), padded(rows, fmt)
        groups = want.reshape(len(rows), -1, 32)
        largest = np.abs(groups).max(-1).astype(np.float32)
        np.testing.assert_array_equal(got.scales, rounded(largest / np.float32(127), fmt))
        scales = np.repeat(got.scales.astype(np.float64), 32, 1)
        assert np.abs(got.codes).max() == 127
        # The largest value is cut off if fp16 rounded the scale down.
        cut = np.maximum(np.abs(want) - 127 * scales, 0)
        assert (cut <= 127 * np.maximum(scales * 2.0**-11, LEAST_HALF / 2)).all()
        assert (np.abs(got.codes * scales - want) <= np.maximum(0.50001 * scales, 1.00001 * cut)).all()
        assert not got.codes[:, k:].any()


def stored(factors: NDArray[np.float64], fmt: WeightFormat) -> NDArray[np.float64]:
    """Factors [rows, groups] as the format has them, each the nearest: as int8 times an fp16 for 256 values, or by
    column."""
    if fmt.scales == "by_column":
        return rounded(factors, fmt)
    together = SUPER // fmt.group
    out = np.empty_like(factors)
    for first in range(0, factors.shape[1], together):
        some = factors[:, first : first + together]
        step = (np.abs(some).max(1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
        whole = np.rint(np.divide(some, step, out=np.zeros_like(some), where=step > 0)).clip(-127, 127)
        out[:, first : first + together] = whole * step
    return out


def squared_errors(values: NDArray[np.float64], lines: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of groups [..., values] rounded to the nearest of scale * [0, 15] + minimum: lines [..., 2]."""
    scale, least = lines[..., :1], lines[..., 1:]
    codes = np.rint(np.divide(values - least, scale, out=np.zeros_like(values), where=scale > 0)).clip(0, 15)
    return ((values - least - scale * codes) ** 2).sum(-1)


@INT4
@pytest.mark.parametrize("k", [128, 576, 1000])
def test_int4_errs_less_than_rounding_between_the_least_and_the_largest_value(fmt: WeightFormat, k: int) -> None:
    for number, rows in enumerate(kinds_of_rows(k)):
        got, want = quantized(rows, fmt), padded(rows, fmt)
        groups = want.reshape(len(rows), -1, fmt.group)
        least, most = groups.min(-1), groups.max(-1)
        plain = np.stack((stored((most - least) / 15, fmt), stored(least, fmt)), -1)
        ours = ((got.values() - want) ** 2).sum()
        theirs = squared_errors(groups, plain).sum()
        assert ours <= theirs, number
        if number == 0:
            assert ours <= 0.93 * theirs


@INT4
def test_int4_codes_are_the_nearest_for_their_scale_and_minimum(fmt: WeightFormat) -> None:
    for rows in kinds_of_rows(1000):
        got, want = quantized(rows, fmt), padded(rows, fmt).reshape(len(rows), -1, fmt.group)
        assert got.mins is not None and got.codes.min() == 0 and got.codes.max() == 15
        lines = np.stack((got.scales, got.mins), -1).astype(np.float64)
        ours = ((got.values() - want.reshape(len(rows), -1)) ** 2).reshape(want.shape).sum(-1)
        np.testing.assert_allclose(ours, squared_errors(want, lines), rtol=1e-3, atol=1e-9 * (want**2).max())


def best_errors(groups: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least squared errors of groups that a fine search over scales and minima finds, both unrounded."""
    least, most = groups.min(-1), groups.max(-1)
    width, best = most - least, np.full(len(groups), np.inf)
    for low in np.linspace(-0.05, 0.3, 71):
        for high in np.linspace(-0.05, 0.3, 71):
            lines = np.stack((width * (1 - low - high) / 15, least + low * width), -1)
            best = np.minimum(best, squared_errors(groups, lines))
    return best


@pytest.mark.parametrize(("group", "worst"), [(32, 1.07), (64, 1.04), (128, 1.03)])
def test_int4_is_close_to_the_best(group: int, worst: float) -> None:
    """On average. The best scales and minima are not rounded; those of two levels err more than those by column."""
    rows = drawn(4, 1024, seed=3)
    best = best_errors(rows.astype(np.float64).reshape(-1, group)).sum()
    two_levels, by_column = (
        ((quantized(rows, held_as(int4_format(group), isa)).values() - rows.astype(np.float64)) ** 2).sum() / best
        for isa in ("", "amx")
    )
    print(f"groups of {group}: {two_levels:.3f} and by column {by_column:.3f} times the least squared error")
    assert 1 <= by_column <= two_levels <= worst


@INT4
def test_values_that_are_all_equal_are_kept_to_the_rounding_of_a_minimum(fmt: WeightFormat) -> None:
    for value in (1.0, -1.0, 3.7, -1234.5, 1e-3, 60000.0):
        got = quantized(np.full((3, 576), value, np.float32), fmt).values()[:, :512]
        assert (np.abs(got - value) <= abs(value) * 2.0**-10 + 127 * LEAST_HALF).all()


@pytest.mark.parametrize("fmt", INT8S + INT4S, ids=str)
def test_zeros_and_values_below_the_least_scale_become_small(fmt: WeightFormat) -> None:
    assert not quantized(np.zeros((3, 576), np.float32), fmt).values().any()
    for size in (1e-45, 1e-30, 1e-8, 1e-6):
        rows = drawn(3, 576) * np.float32(size)
        got = quantized(rows, fmt).values()
        assert np.isfinite(got).all() and np.abs(got[:, :576] - rows).max() <= 200 * LEAST_HALF


@pytest.mark.parametrize("fmt", INT8S + INT4S, ids=str)
def test_the_largest_values_that_a_scale_can_hold_are_kept(fmt: WeightFormat) -> None:
    """fp16 ends at 65504: int8's scale is a 127th of the largest value, int4's super scale another 127th. Values by
    column are below 2^64."""
    rows = drawn(3, 576)
    rows *= np.float32(60000 * 127) / np.abs(rows).max()
    got = quantized(rows, fmt).values()[:, :576]
    assert np.isfinite(got).all() and np.abs(got - rows).max() <= 0.2 * np.abs(rows).max()
    for large in (2e19 if fmt.scales == "by_column" else 3e7 * 127, 1e20, 3e38):
        rows[1] *= np.float32(large) / np.abs(rows[1]).max()
        with pytest.raises(ValueError, match=r"^1 rows hold .*too large to quantise"):
            pack(torch.from_numpy(rows), None, fmt)


@INT4
def test_a_part_of_256_values_at_the_end_has_scales_of_its_own(fmt: WeightFormat) -> None:
    """The last super group is shorter: it is quantised as it would be alone, and padding changes nothing before it."""
    rows = drawn(20, 576)
    rows[:, 512:] *= 1e-3
    whole, alone = quantized(rows, fmt), quantized(np.ascontiguousarray(rows[:, 512:]), fmt)
    first = quantized(np.ascontiguousarray(rows[:, :512]), fmt)
    np.testing.assert_array_equal(whole.values(), np.concatenate((first.values(), alone.values()), 1))
