"""Packs dense weights that are in memory."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.weights import COLUMNS, WeightFormat
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.packer import NativePacker
from penstock.kernels.native.packing import PackedWeight


def pack(
    weight: Tensor, bias: Tensor | None, fmt: WeightFormat, *, gated: bool = False, count: int = 1
) -> PackedWeight:
    """Pack a dense weight [n, k] and its bias [n]. A gated one is two weights of the same size, the gate first.
    `weight` may be `count` weights stacked below each other, without a bias."""
    shape = (weight.shape[0], weight.shape[1])
    packer = NativePacker(shape, fmt, gated=gated, memory=WeightMemory(), experts=count)
    packer.put(0, weight.contiguous())
    packed = packer.finish()
    return packed if bias is None else with_bias(packed, bias)


def with_bias(weight: PackedWeight, bias: Tensor) -> PackedWeight:
    """The weight with a dense bias [count * n]."""
    return replace(weight, bias=torch.cat([_packed_bias(each, weight.gated) for each in bias.chunk(weight.count)]))


def _packed_bias(bias: Tensor, gated: bool) -> Tensor:
    """A bias [n] in the order of packed columns."""
    halves, height = (bias.chunk(2), COLUMNS // 2) if gated else ((bias,), COLUMNS)
    blocks = [F.pad(half.float(), (0, -len(half) % height)).view(-1, height) for half in halves]
    return torch.cat(blocks, 1).view(-1)
