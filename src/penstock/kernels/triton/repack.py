"""Writes rows of codes, as a checkpoint has them, into the columns of a coded weight. Native code decodes them into the
CPU's layout, without loss. Torch changes that into a GPU's layout, on the weight's device."""

import torch
from torch import Tensor

from penstock.config.weights import COLUMNS, device_width
from penstock.kernels.coded_rows import CodedRows, same_order
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.packer import NativePacker
from penstock.kernels.native.packing import PackedWeight
from penstock.kernels.triton.weights import CodedWeight, pack_codes

WORD = 4  # bytes of a column in a line


def put_stored(weight: CodedWeight, start: int, rows: Tensor, dtype: str) -> None:
    """Write rows of a GGUF type, uint8 [count, bytes of a row] on the CPU, into the weight from row `start` on. Several
    threads may call at once, each with rows of its own.

    ValueError for rows of another width, and if a scale is not finite or not exact in the weight's format.
    """
    packer = _packer(weight, len(rows))
    packer.put_stored(0, rows, dtype)
    _write(weight, start, packer.finish())


def put_codes(weight: CodedWeight, start: int, rows: CodedRows) -> None:
    """Like `put_stored`, for codes: see CodePacker.put_codes."""
    packer = _packer(weight, len(rows.codes))
    packer.put_codes(0, rows)
    _write(weight, start, packer.finish())
    if weight.order is not None and rows.order is not None:
        before = weight.order.numpy(force=True)
        order = same_order(before if before.any() else None, rows.order)
        weight.order.copy_(torch.from_numpy(order))


def _packer(weight: CodedWeight, rows: int) -> NativePacker:
    return NativePacker((rows, weight.k), weight.format, gated=False, memory=WeightMemory())


def _write(weight: CodedWeight, start: int, packed: PackedWeight) -> None:
    """Write packed rows into the weight from row `start` on."""
    part = slice(start, start + packed.n)
    assert packed.scales is not None
    weight.codes[:, part] = pack_codes(_codes(packed, weight.codes.device), weight.format)
    pairs = zip(weight.factors, (packed.scales, packed.super_scales, packed.mins, packed.super_mins), strict=True)
    for own, native in pairs:
        if own is not None and native is not None:
            columns = native.to(own.device).permute(1, 0, 2).flatten(1)[:, : packed.n]
            own[: len(columns), part] = columns


def _codes(packed: PackedWeight, device: torch.device) -> Tensor:
    """Codes of a byte each, [a GPU's padded k, n]."""
    fmt = packed.format
    blocks = -(-packed.n // COLUMNS)
    words = packed.lines.to(device).view(blocks, -1, COLUMNS, WORD)
    if fmt.bits == 4:  # the low halves of a word are four values, the high ones the next four
        words = torch.cat((words & 15, words >> 4), -1)
    codes = words.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)[:, : packed.n]
    padding = device_width(packed.k, fmt) - len(codes)
    return torch.cat((codes, codes.new_zeros(padding, packed.n))) if padding else codes
