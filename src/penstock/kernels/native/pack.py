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
    """The weight with a dense bias [n]."""
    halves, height = (bias.chunk(2), COLUMNS // 2) if weight.gated else ((bias,), COLUMNS)
    blocks = [F.pad(half.float(), (0, -len(half) % height)).view(-1, height) for half in halves]
    return replace(weight, bias=torch.cat(blocks, 1).view(-1))
