"""The arithmetic of packed weights, written out in NumPy. Native kernels must give the same bits."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.weights import (
    BF16,
    COLUMNS,
    F32,
    GGUF_FORMATS,
    GROUP_OF_X,
    INT8,
    INT16,
    LINE_BYTES,
    SUPER,
    WeightFormat,
    format_of,
    held_as,
    int4_format,
)
from penstock.kernels.native.layout import Layout, Parts
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.packing import PackedWeight, packed_weight

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
NF4 = (-124, -86, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124)  # in units of 1 / 124.11
FP4 = (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30)  # of 1 / 120
TABLES = {"iq4": IQ4, "mxfp4": MXFP4, "nf4": NF4, "fp4": FP4}
BITSANDBYTES = {kind: replace(INT8, codes=kind.lower(), scales="f32", group=64) for kind in ("NF4", "FP4")}
LEAST = 2.0**-126  # of the normal numbers of fp32 and bf16
# How tiles pair each 32 values along k. Of codes those are pairs whose bits lie 16 apart.
PAIRS_OF_FLOATS = np.arange(32).reshape(16, 2)
PAIRS_OF_CODES = (np.array([(0, 2), (1, 3), (4, 6), (5, 7)]) + 8 * np.arange(4)[:, None, None]).reshape(16, 2)

JOINED = (
    ("Q4_K", "Q6_K"),
    ("Q2_K", "Q4_K"),
    ("Q3_K", "Q6_K"),
    ("Q4_0", "Q4_1"),
    ("Q4_0", "Q8_0"),
    ("Q4_1", "Q5_1"),
    ("IQ4_NL", "Q8_0"),
    ("IQ4_NL", "IQ4_XS"),
    ("IQ4_XS", "Q5_K"),
    ("MXFP4", "Q8_0"),
    ("Q4_0", "Q4_K"),
    ("Q2_K", "Q4_1"),
    ("Q4_1", "Q6_K", "Q8_0"),
)


def grouped_formats(isa: str) -> dict[str, WeightFormat]:
    """All grouped formats of an instruction set that tests use, by a name."""
    int4 = {f"int4-{group}": int4_format(group) for group in (32, 64, 128)}
    joined = {"+".join(names): format_of(GGUF_FORMATS[name] for name in names) for names in JOINED}
    formats = {"int8": INT8, **int4, **GGUF_FORMATS, **joined, **BITSANDBYTES}
    return {name: held_as(fmt, isa) for name, fmt in formats.items()}


def formats_from_floats(isa: str) -> dict[str, WeightFormat]:
    """The formats of weights that are packed from floats."""
    names = ("int8", *(f"int4-{group}" for group in (32, 64, 128)))
    return {"f32": F32, "bf16": BF16, "int16": INT16, **{name: grouped_formats(isa)[name] for name in names}}


BEST = next(iter(instruction_sets()), "")  # the instruction set under test
GROUPED, FROM_FLOATS = grouped_formats(BEST), formats_from_floats(BEST)


@dataclass(frozen=True)
class Grouped:
    """A grouped weight: value = (scales * codes + mins) * powers."""

    codes: NDArray[np.int32]  # [rows, padded k], less the zero
    scales: Floats  # [rows, groups], as are mins
    mins: Floats | None
    group: int
    powers: Floats  # [rows]: those of scales by column, else ones

    def values(self) -> Floats:
        """The values, with the product rounded before the minimum is added."""
        values = self.codes.astype(np.float32) * np.repeat(self.scales, self.group, 1)
        values = values if self.mins is None else values + np.repeat(self.mins, self.group, 1)
        return values * self.powers[:, None]


def rows_of(weight: PackedWeight) -> NDArray[np.int64]:
    """The column in the packed blocks of each row of the dense weight, of all experts."""
    at = np.arange(weight.n)
    if weight.gated:
        half = weight.n // 2
        within = at % half
        at = within // 8 * COLUMNS + at // half * 8 + within % 8
    columns = weight.lines.numel() // weight.count // (weight.format.padded_width(weight.k) * weight.format.bits // 8)
    return (np.arange(weight.count)[:, None] * columns + at).reshape(-1)


def words_of(weight: PackedWeight) -> NDArray[np.uint8]:
    """The bytes of each row of the dense weight: [rows, bytes]."""
    size = weight.format.padded_width(weight.k) * weight.format.bits // 8
    blocks = weight.lines.numpy().reshape(-1, size * COLUMNS // LINE_BYTES, COLUMNS, 4)
    return blocks.transpose(0, 2, 1, 3).reshape(-1, size)[rows_of(weight)]


def factors_of(weight: PackedWeight, name: str) -> Floats:
    """The scales or the minima of groups, as fp32: [rows, groups]."""
    fmt, part = weight.format, weight.parts[name]
    assert part is not None
    groups = fmt.groups(weight.k)
    factors = part.numpy().reshape(-1, groups, COLUMNS).transpose(0, 2, 1).reshape(-1, groups).astype(np.float32)
    super_part = weight.parts[f"super_{name}"]
    if super_part is not None:
        supers = fmt.supers(weight.k)
        second = super_part.numpy().reshape(-1, supers, COLUMNS).transpose(0, 2, 1).reshape(-1, supers)
        factors = np.repeat(second.astype(np.float32), SUPER // fmt.group, 1)[:, :groups] * factors
    return factors[rows_of(weight)]


def unpacked(weight: PackedWeight) -> Grouped:
    """The codes, scales and minima of a grouped weight."""
    fmt, codes = weight.format, words_of(weight)
    if fmt.codes != "bytes":
        fours = codes.reshape(len(codes), -1, 4)
        codes = np.concatenate((fours & 15, fours >> 4), -1).reshape(len(codes), -1)
    table = TABLES.get(fmt.codes)
    whole = codes.astype(np.int32) - fmt.zero if table is None else np.array(table, np.int32)[codes]
    mins = factors_of(weight, "mins") if fmt.mins else None
    powers = np.ones(len(codes), np.float32)
    if weight.column_scales is not None:
        powers = weight.column_scales.numpy()[rows_of(weight)] * np.float32(2.0**-48)
    return Grouped(whole, factors_of(weight, "scales"), mins, fmt.group, powers)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once: the product is exact in fp64. Where the rounded sum lies between two numbers of fp32, or
    below all normal ones, it is rounded to odd before it becomes fp32."""
    left, right = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    total = left + right
    bits = total.view(np.int64)
    if not (((bits & 0x1FFFFFFF) == 0x10000000) | ((np.abs(total) < LEAST) & (total != 0))).any():
        return total.astype(np.float32)
    back = total - left
    error = (left - (total - back)) + (right - back)
    outwards = (error > 0) == (total > 0)
    odd = np.where((error != 0) & (bits & 1 == 0), np.where(outwards, 1, -1), 0)
    return (bits + odd).view(np.float64).astype(np.float32)


def quantized(x: Floats, padded: int) -> tuple[NDArray[np.int32], Floats]:
    """Rows as codes of int8 [rows, padded], and a scale for each GROUP_OF_X values."""
    groups = np.pad(x, ((0, 0), (0, padded - x.shape[1]))).reshape(len(x), -1, GROUP_OF_X)
    scales = np.abs(groups).max(-1) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(groups * inverse[..., None]).astype(np.int32).reshape(len(x), -1), scales


def product(x: Floats, weight: PackedWeight) -> Floats:
    """x weight^T of a grouped weight, without its bias, as the instruction sets multiply its format."""
    return product_by_tiles(x, weight) if weight.format.scales == "by_column" else product_by_spans(x, weight)


def product_by_spans(x: Floats, weight: PackedWeight) -> Floats:
    """Exact sums of spans, scaled and added in their order."""
    grouped = unpacked(weight)
    padded = grouped.codes.shape[1]
    codes, x_scales = quantized(x, padded)
    span = min(grouped.group, GROUP_OF_X)
    of_x = codes.reshape(len(x), -1, span).transpose(1, 0, 2)
    of_weight = grouped.codes.reshape(len(grouped.codes), -1, span).transpose(1, 2, 0)
    total = np.zeros((len(x), len(grouped.codes)), np.float32)
    offset = np.zeros((len(x), 1), np.float32)  # what a minimum of 1 adds, over the group's spans so far
    for i, (ours, theirs) in enumerate(zip(of_x, of_weight, strict=True)):
        sums = (ours.astype(np.float64) @ theirs.astype(np.float64)).astype(np.float32)
        group, scale = i * span // grouped.group, x_scales[:, i * span // GROUP_OF_X, None]
        total = fma(sums, grouped.scales[:, group] * scale, total)
        if grouped.mins is not None:
            offset = offset + scale * ours.sum(-1, keepdims=True).astype(np.float32)
            if (i + 1) * span % grouped.group == 0:
                total = fma(grouped.mins[:, group], offset, total)
                offset = np.zeros_like(offset)
    return total


def normal(x: Floats) -> Floats:
    """The numbers with zeros instead of denormals."""
    return np.where(np.abs(x) < LEAST, np.copysign(np.float32(0), x), x)


def as_bf16(x: Floats) -> Floats:
    """To the nearest, ties to even, as VCVTNEPS2BF16 does: denormals become zeros."""
    bits = normal(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@np.errstate(over="ignore", invalid="ignore")  # as not to warn of numbers that are not finite
def tile_sums(x: Floats, weight: Floats, pairs: NDArray[np.int64]) -> Floats:
    """x weight^T of numbers of bf16, as TDPBF16PS sums: of each 32 values along k, the first of each of the 16 `pairs`
    in order, and the second ones; both sums are added to each other, and then to what was there."""
    total = np.zeros((len(x), len(weight)), np.float32)
    x, weight = normal(x), normal(weight)
    for first in range(0, x.shape[1], 32):
        sums = np.zeros((2, *total.shape), np.float32)
        for pair in first + pairs:
            sums = normal(fma(x[:, pair].T[:, :, None], weight[:, pair].T[:, None, :], sums))
        total = normal(total + normal(sums[0] + sums[1]))
    return total


def halves(x: Doubles) -> NDArray[np.float16]:
    """Rounded to fp16. One operation on numbers of fp16 is exact in fp64, or so close that it is rounded alike."""
    return x.astype(np.float16)


def tile_values(weight: PackedWeight) -> Floats:
    """The weights by column that tiles multiply, times 2^-112: widened in fp16, then rounded to bf16, ties away from
    zero."""
    fmt, grouped = weight.format, unpacked(weight)
    scale = np.repeat(grouped.scales.astype(np.float64), fmt.group, 1)
    least = 0.0 if grouped.mins is None else np.repeat(grouped.mins.astype(np.float64), fmt.group, 1)
    if fmt.codes in TABLES:
        values = halves(grouped.codes * scale + least)
    else:
        code = grouped.codes + fmt.zero + (16 if fmt.codes == "nibbles" else 0)
        start = halves(least - (code - grouped.codes) * scale).astype(np.float64)
        values = halves(code * scale + start)
    bits = (values.view(np.int16).astype(np.int32) + 4 >> 3) & 0x8FFF
    return (bits.astype(np.uint32) << 16).view(np.float32)


@np.errstate(over="ignore", invalid="ignore")
def product_by_tiles(x: Floats, weight: PackedWeight) -> Floats:
    """Products of bf16 with weights by column. Powers of two keep both in the range of bf16."""
    values = tile_values(weight)
    padded = np.pad(x, ((0, 0), (0, values.shape[1] - x.shape[1])))
    sums = tile_sums(as_bf16(padded * np.float32(2.0**64)), values, PAIRS_OF_CODES)
    return sums * (unpacked(weight).powers * np.float32(2.0**48))


def random_weight(
    fmt: WeightFormat, n: int, k: int, *, gated: bool = False, count: int = 1, seed: int = 0
) -> PackedWeight:
    """A grouped weight of random codes and factors: every value that the format can hold, in its padding as well."""
    random = np.random.default_rng((seed, n, k))
    layout = Layout(n, k, fmt, gated, count)
    parts = layout.empty()
    for part in parts.values():
        if part is None:
            continue
        if part.dtype.kind == "f":
            part[...] = random.standard_normal(part.shape) * 10.0 ** random.integers(-3, 1, part.shape)
        else:
            whole: Any = np.iinfo(part.dtype)
            part[...] = random.integers(whole.min, whole.max, part.shape, part.dtype, endpoint=True)
    if fmt.scales == "by_column":
        _fit_columns(parts, fmt, random)
    return packed_weight(layout, parts)


def _fit_columns(parts: Parts, fmt: WeightFormat, random: np.random.Generator) -> None:
    """Scales the factors of each column until the largest value of any code is less than 2^14, and draws its power."""
    scales, mins, powers = parts["scales"], parts["mins"], parts["column_scales"]
    assert scales is not None and powers is not None
    table = TABLES.get(fmt.codes)
    ends = np.array([min(table), max(table)] if table else [-fmt.zero, 2**fmt.bits - 1 - fmt.zero])
    wide = scales.astype(np.float64)
    added = 0.0 if mins is None else mins.astype(np.float64)
    largest = np.abs(wide[..., None] * ends + np.asarray(added)[..., None]).max((-3, -1))[:, :, None]
    up = 0.999 * 2.0**14 / largest * random.uniform(0.5, 1, largest.shape)
    scales[...] = wide * up
    if mins is not None:
        mins[...] = added * up
    powers[...] = 2.0 ** random.integers(28, 40, powers.shape)


def same_bits(got: torch.Tensor, want: Floats) -> bool:
    """Whether all values have the same bits."""
    return np.array_equal(got.numpy().view(np.uint32), np.ascontiguousarray(want).view(np.uint32))
