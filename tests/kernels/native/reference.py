"""The arithmetic of packed weights, written out in NumPy. Native kernels must give the same bits."""

from dataclasses import dataclass
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
    int4_format,
)
from penstock.kernels.native.layout import Layout
from penstock.kernels.native.packing import PackedWeight, packed_weight

Floats = NDArray[np.float32]
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TABLES = {"iq4": IQ4, "mxfp4": MXFP4}

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
# All grouped formats that tests use, by a name.
GROUPED: dict[str, WeightFormat] = {
    "int8": INT8,
    **{f"int4-{group}": int4_format(group) for group in (32, 64, 128)},
    **GGUF_FORMATS,
    **{"+".join(names): format_of(names) for names in JOINED},
}
# The formats of weights that are packed from floats.
FROM_FLOATS: dict[str, WeightFormat] = {
    "f32": F32,
    "bf16": BF16,
    "int16": INT16,
    "int8": INT8,
    **{f"int4-{group}": int4_format(group) for group in (32, 64, 128)},
}


@dataclass(frozen=True)
class Grouped:
    """A grouped weight: value = scales * codes + mins."""

    codes: NDArray[np.int32]  # [rows, padded k], less the zero
    scales: Floats  # [rows, groups], as are mins
    mins: Floats | None
    group: int

    def values(self) -> Floats:
        """The values, with the product rounded before the minimum is added."""
        values = self.codes.astype(np.float32) * np.repeat(self.scales, self.group, 1)
        return values if self.mins is None else values + np.repeat(self.mins, self.group, 1)


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
    return Grouped(whole, factors_of(weight, "scales"), factors_of(weight, "mins") if fmt.mins else None, fmt.group)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once: the product is exact in fp64, and the sum is rounded to odd before it becomes fp32."""
    left, right = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    total = left + right
    back = total - left
    error = (left - (total - back)) + (right - back)
    bits = total.view(np.int64)
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
    """x weight^T of a grouped weight, without its bias: exact sums of spans, scaled and added in their order."""
    grouped = unpacked(weight)
    padded = grouped.codes.shape[1]
    codes, x_scales = quantized(x, padded)
    span = min(grouped.group, GROUP_OF_X)
    of_x = codes.reshape(len(x), -1, span).transpose(1, 0, 2)
    of_weight = grouped.codes.reshape(len(grouped.codes), -1, span).transpose(1, 2, 0)
    total = np.zeros((len(x), len(grouped.codes)), np.float32)
    for i, (ours, theirs) in enumerate(zip(of_x, of_weight, strict=True)):
        sums = (ours.astype(np.float64) @ theirs.astype(np.float64)).astype(np.float32)
        group, scale = i * span // grouped.group, x_scales[:, i * span // GROUP_OF_X, None]
        total = fma(sums, grouped.scales[:, group] * scale, total)
        if grouped.mins is not None:
            total = fma(grouped.mins[:, group], scale * ours.sum(-1, keepdims=True).astype(np.float32), total)
    return total


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
    return packed_weight(layout, parts)


def same_bits(got: torch.Tensor, want: Floats) -> bool:
    """Whether all values have the same bits."""
    return np.array_equal(got.numpy().view(np.uint32), np.ascontiguousarray(want).view(np.uint32))
