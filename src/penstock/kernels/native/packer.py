"""Packing a weight while it is read: by rows, in any order, from several threads."""

import torch
from torch import Tensor

from penstock.config.weights import Scheme
from penstock.kernels.native.library import SCHEMES, PackJob, pack_rows
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.packing import PackedWeight, empty_packed

STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NativePacker:
    """Provides Packer (see kernels/packers.py). The bits are those of packing.pack."""

    def __init__(
        self, shape: tuple[int, int], scheme: Scheme, group: int, *, gated: bool, memory: WeightMemory
    ) -> None:
        self._weight = empty_packed(*shape, scheme, group, gated=gated, empty=memory.empty)

    def put(self, start: int, rows: Tensor) -> None:
        weight = self._weight
        if rows.shape[1:] != (weight.k,) or not 0 <= start <= start + len(rows) <= weight.n or not rows.is_contiguous():
            raise ValueError(f"rows {start} + {list(rows.shape)} do not belong to a weight [{weight.n}, {weight.k}]")
        matrix = weight.matrix()
        job = PackJob(
            rows.data_ptr(),
            matrix.lines,
            matrix.column_scales,
            matrix.group_scales,
            start,
            len(rows),
            weight.n,
            weight.k,
            SCHEMES.index(weight.scheme),
            weight.group,
            STORED[rows.dtype],
            weight.gated,
        )
        if bad := pack_rows(job):
            raise ValueError(f"{bad} rows hold infinity or NaN, or are too large to quantise: use --quantization none")

    def finish(self) -> PackedWeight:
        return self._weight
