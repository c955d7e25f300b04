"""Weights in a GPU's layouts, packed from floats at once, and their values."""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.config.weights import SUPER, TABLES
from penstock.kernels.triton.weights import CodedWeight, QuantizedWeight, Scheme, check_rows, empty_weight, write_rows


def pack(weight: Tensor, scheme: Scheme, group: int = 32, bias: Tensor | None = None) -> QuantizedWeight | CodedWeight:
    """Quantises a dense weight [n, k] with its bias [n], on its device. ValueError if a row cannot be quantised."""
    packed = empty_weight(weight.shape[0], weight.shape[1], scheme, group, weight.device)
    write_rows(packed, 0, weight)
    check_rows(packed)
    return packed if bias is None else replace(packed, bias=bias)


def dense(weight: QuantizedWeight | CodedWeight, start: int = 0, stop: int | None = None) -> Tensor:
    """The dequantised rows [start, stop) of a weight, in fp32."""
    if isinstance(weight, QuantizedWeight):
        return weight.values[start:stop].float() * weight.scales[start:stop, None]
    fmt, codes = weight.format, weight.codes[:, start:stop]
    if fmt.bits == 4:
        runs = codes.unflatten(0, (-1, weight.half))
        codes = torch.stack([runs & 15, runs >> 4], 1).flatten(0, 2)
    table = TABLES.get(fmt.codes)
    values = codes.float() - fmt.zero if table is None else codes.new_tensor(table, dtype=torch.float32)[codes.int()]
    values *= _by_value(weight.scales, weight.super_scales, weight)[:, start:stop]
    if weight.mins is not None:
        values += _by_value(weight.mins, weight.super_mins, weight)[:, start:stop]
    return values[: weight.k].t()


def _by_value(first: Tensor, second: Tensor | None, weight: CodedWeight) -> Tensor:
    """The scale or the minimum of each value, fp32 [padded k, n]."""
    group, factors = weight.format.group, first.float()
    if second is not None:
        factors *= second.float().repeat_interleave(SUPER // group, 0)[: len(factors)]
    return factors.repeat_interleave(group, 0)
