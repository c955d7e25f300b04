"""Weights packed for the native kernels (see Scheme in cpp/ops.h)."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.weights import COLUMNS, LINE_BYTES, Scheme, num_blocks, padded_width
from penstock.kernels.native.layout import Layout, Parts
from penstock.kernels.native.structs import SCHEMES, Matrix

PIECE = 1 << 22  # elements packed at once: bounds the memory used besides the result
# int8: AVX2 sums four products in 16 bits (see docs/kernels.md), so the positive values among four must sum to at most
# 128, and the negative ones too. Rounding adds half of one to each of them: 126 + 4/2.
MOST_SUMMED = 126
# int16: products of SPAN values along k are summed in 32 bits. They fit, since in a row of x and in a weight's row the
# root of the sum of their squares is at most MOST_NORM. Rounding adds 8 at most: 46308² < 2³¹.
SPAN = 256
MOST_NORM = 46300.0
MOST_INT16 = 32767.0


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight [n, k] and its bias. Every 16 columns of a gated weight are 8 of the gate and 8 of the other
    half."""

    lines: Tensor  # uint8
    column_scales: Tensor | None  # int8, int16: fp32 [n padded]
    column_sums: Tensor | None  # int8: the sum of a row's bytes, int32 [n padded]
    group_scales: Tensor | None  # int4: fp16 [blocks, groups, 16]
    bias: Tensor | None  # fp32 [n padded]
    n: int
    k: int
    scheme: Scheme
    group: int = 0
    gated: bool = False
    count: int = 1  # weights [n, k] that lie one behind the other, without a bias: those of experts

    @property
    def parts(self) -> dict[str, Tensor | None]:
        """The tensors by name, in the order of `Matrix`, without the bias."""
        return {name: getattr(self, name) for name in ("lines", "column_scales", "column_sums", "group_scales")}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (*self.parts.values(), self.bias) if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def matrix(self) -> Matrix:
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in self.parts.values())
        return Matrix(*pointers, self.n, self.k, SCHEMES.index(self.scheme), self.group)


def packed_weight(layout: Layout, parts: Parts) -> PackedWeight:
    """A PackedWeight that shares the memory of the parts."""
    lines, column_scales, column_sums, group_scales = (
        None if part is None else torch.from_numpy(part) for part in parts.values()
    )
    assert lines is not None
    return PackedWeight(
        lines.view(-1),
        None if column_scales is None else column_scales.view(-1),
        None if column_sums is None else column_sums.view(-1),
        None if group_scales is None else group_scales.flatten(0, 1),
        None,
        layout.n,
        layout.k,
        layout.scheme,
        layout.group if layout.scheme == "int4" else 0,
        layout.gated,
        layout.count,
    )


def empty_packed(n: int, k: int, scheme: Scheme, group: int, *, gated: bool, count: int = 1) -> PackedWeight:
    """Memory for `count` weights [n, k]."""
    layout = Layout(n, k, scheme, group, gated, count)
    return packed_weight(layout, layout.empty())


def pack(weight: Tensor, bias: Tensor | None, scheme: Scheme, *, group: int = 32, gated: bool = False) -> PackedWeight:
    """Pack a dense weight [n, k] and its bias [n]. A gated one is two weights of the same size, the gate first.

    int8 has a scale per row, int4 one per `group` values of a row, both symmetric and rounded to the nearest. int8's
    scale makes the largest value 127, or less if four neighbours could not be summed in 16 bits. int16 has a scale per
    row: the least power of two for which the products of `SPAN` values can be summed in 32 bits. This is the reference
    of packing: cpp/pack.cpp gives the same bits, faster.
    """
    n, k = weight.shape
    packed = empty_packed(n, k, scheme, group, gated=gated)
    blocks, padded = num_blocks(n, gated=gated), padded_width(k, scheme, group)
    lines = packed.lines.view(blocks, -1, LINE_BYTES)
    column_scales, column_sums, group_scales = packed.column_scales, packed.column_sums, packed.group_scales
    at_once = max(PIECE // (padded * COLUMNS), 1)
    for start in range(0, blocks, at_once):
        stop = min(start + at_once, blocks)
        rows = F.pad(_rows(weight, start, stop, gated), (0, padded - k))  # [blocks, 16, padded]
        if scheme == "int8":
            assert column_scales is not None and column_sums is not None
            columns = slice(start * COLUMNS, stop * COLUMNS)
            rows, column_scales[columns] = _int8(rows)
            column_sums[columns] = rows.sum(-1).view(-1)
        elif scheme == "int16":
            assert column_scales is not None
            rows, column_scales[start * COLUMNS : stop * COLUMNS] = _int16(rows)
        elif scheme == "int4":
            assert group_scales is not None
            rows, group_scales[start:stop] = _int4(rows, group)
        else:
            rows = rows.to({"f32": torch.float32, "bf16": torch.bfloat16}[scheme])
        words = rows.reshape(stop - start, COLUMNS, -1, 4 // rows.itemsize if scheme != "f32" else 1)
        lines[start:stop] = words.transpose(1, 2).contiguous().view(torch.uint8).view(stop - start, -1, LINE_BYTES)
    return packed if bias is None else with_bias(packed, bias)


def pack_stack(weight: Tensor, count: int, scheme: Scheme, *, group: int = 32, gated: bool = False) -> PackedWeight:
    """Pack `count` dense weights that are stacked below each other."""
    n, k = weight.shape[0] // count, weight.shape[1]
    stack = empty_packed(n, k, scheme, group, gated=gated, count=count)
    for i, rows in enumerate(weight.chunk(count)):
        one = pack(rows, None, scheme, group=group, gated=gated)
        for ours, whole in zip(one.tensors, stack.tensors, strict=True):
            whole.view(count, *ours.shape)[i] = ours
    return stack


def with_bias(weight: PackedWeight, bias: Tensor) -> PackedWeight:
    """The weight with a dense bias [n]."""
    blocks = num_blocks(weight.n, gated=weight.gated)
    return replace(weight, bias=_rows(bias[:, None], 0, blocks, weight.gated).float().reshape(-1).contiguous())


def _rows(weight: Tensor, start: int, stop: int, gated: bool) -> Tensor:
    """The rows of blocks start to stop: [blocks, 16, k], padded with zeros."""
    halves = (weight,) if not gated else (weight[: len(weight) // 2], weight[len(weight) // 2 :])
    height = COLUMNS // len(halves)
    parts = []
    for half in halves:
        part = half[start * height : stop * height]
        part = F.pad(part, (0, 0, 0, (stop - start) * height - len(part)))
        parts.append(part.view(stop - start, height, -1))
    return torch.cat(parts, 1)


def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    pairs = wide.view(*rows.shape[:2], -1, 2, 2, 2)  # [eight, half, pair, value]; pairs at the same place are summed
    sums = [part.clamp_min(0).sum(-1).sum(-2).amax((-1, -2)) for part in (pairs, -pairs)]
    scales = torch.maximum(wide.abs().amax(-1) / 127, torch.maximum(*sums) / MOST_SUMMED)
    values = (wide / scales.clamp_min(1e-30)[..., None]).round_().to(torch.int8)
    return values, scales.reshape(-1)


def _int16(rows: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    spans = F.pad(wide, (0, -rows.shape[-1] % SPAN)).view(*rows.shape[:2], -1, SPAN)
    norms = spans.double().square().sum(-1).sqrt().amax(-1)
    room = torch.maximum(norms / MOST_NORM, wide.abs().amax(-1) / MOST_INT16).clamp_min(2.0**-126)
    fraction, exponent = torch.frexp(room)
    scales = torch.ldexp(torch.ones_like(room), exponent - (fraction == 0.5).int()).float()
    scales = torch.where(wide.isfinite().all(-1), scales, torch.nan)
    values = (wide / scales[..., None]).round_().nan_to_num_(0.0).to(torch.int16)
    return values, torch.where((rows == 0).all(-1), 0.0, scales).reshape(-1)


def _int4(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Eight values per word, the first in the lowest bits. Values are -8 to 7: the scale makes the largest -8 or 7."""
    wide = rows.float().view(*rows.shape[:2], -1, group)
    largest = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))[..., 0]
    scales = (largest / -8 + 0.0).half()  # a group of zeros has no sign
    factors = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    values = (wide * factors[..., None]).round_().clamp_(-8, 7).to(torch.int32).view(*rows.shape[:2], -1, 8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    words = ((values & 15) << shifts).sum(-1, dtype=torch.int64)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words, scales.transpose(1, 2)
