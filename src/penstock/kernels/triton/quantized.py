"""Activations quantised by rows, which quantised products read. Norms and gates can write them directly."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.overlap import await_inputs, overlap

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the quantised value of a row's largest magnitude
BLOCK = 4096  # columns per iteration
WARPS = 8


class QuantizedRows(NamedTuple):
    values: Tensor  # fp8 e4m3 or int8 [rows, width]
    scales: Tensor  # fp32 [rows, 1]: 0 for a row of zeros, NaN for one with a value that is not finite
    dtype: torch.dtype  # of the rows before, and of products of them

    @classmethod
    def empty(cls, like: Tensor, width: int, dtype: torch.dtype) -> "QuantizedRows":
        rows = like.shape[0]
        values, scales = like.new_empty((rows, width), dtype=dtype), like.new_empty((rows, 1), dtype=torch.float32)
        return cls(values, scales, like.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """x [rows, width] quantised to fp8 or int8."""
    out = QuantizedRows.empty(x, x.shape[1], dtype)
    if len(x):
        block = min(triton.next_power_of_2(x.shape[1]), BLOCK)
        _quantize_rows[(len(x),)](
            x,
            out.values,
            out.scales,
            x.shape[1],
            x.stride(0),
            LIMIT=LIMITS[dtype],
            COLUMNS=block,
            num_warps=WARPS,
            **overlap(),
        )
    return out


@triton.jit
def row_scale(largest, poison, LIMIT: tl.constexpr):
    """(scale, its inverse) of a row. `poison` is 0, or NaN if a value of the row is not finite: maxima ignore NaN."""
    sound = largest + poison
    return sound / LIMIT, tl.where(sound == 0.0, 0.0, LIMIT / tl.where(sound == 0.0, 1.0, sound))


@triton.jit
def quantize(values, inverse, DTYPE: tl.constexpr):
    """fp32 values to fp8, or to int8 rounded to the nearest."""
    scaled = values * inverse
    if DTYPE.is_int():
        # Adding 1.5 * 2**23 rounds to whole numbers. A value that is not finite becomes 0: the row's scale is then NaN.
        scaled = tl.where(tl.abs(scaled) < 128.0, (scaled + 12582912.0) - 12582912.0, 0.0)
    return scaled.to(DTYPE)


@triton.jit
def _quantize_rows(x, values, scales, width, stride, LIMIT: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """Each program reads one row twice, the second time from the cache."""
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    largest = tl.zeros([COLUMNS], tl.float32)
    poison = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        part = tl.load(x + row * stride + start + column, mask=start + column < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(part))
        poison += part * 0.0
    scale, inverse = row_scale(tl.max(largest, 0), tl.sum(poison, 0), LIMIT)
    tl.store(scales + row, scale)
    for start in range(0, width, COLUMNS):
        inside = start + column < width
        part = tl.load(x + row * stride + start + column, mask=inside, other=0.0).to(tl.float32)
        out = quantize(part, inverse, values.dtype.element_ty)
        tl.store(values + row * width + start + column, out, mask=inside)
