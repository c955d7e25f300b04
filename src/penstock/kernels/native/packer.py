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
        self,
        shape: tuple[int, int],
        scheme: Scheme,
        group: int,
        *,
        gated: bool,
        memory: WeightMemory,
        experts: int = 1,
    ) -> None:
        """For a weight of a shape, which is `experts` weights one below the other."""
        n, k = shape[0] // experts, shape[1]
        self._weight = empty_packed(n, k, scheme, group, gated=gated, count=experts, empty=memory.empty)

    def put(self, start: int, rows: Tensor) -> None:
        weight = self._weight
        total = weight.n * weight.count
        if rows.shape[1:] != (weight.k,) or not 0 <= start <= start + len(rows) <= total or not rows.is_contiguous():
            raise ValueError(f"rows {start} + {list(rows.shape)} do not belong to a weight [{total}, {weight.k}]")
        while len(rows):
            first = start % weight.n
            self._put(start // weight.n, first, rows[: weight.n - first])
            start, rows = start + weight.n - first, rows[weight.n - first :]

    def _put(self, expert: int, first: int, rows: Tensor) -> None:
        weight = self._weight
        # Where the expert's parts begin: all have the same size.
        parts = (
            None if whole is None else whole.data_ptr() + expert * (whole.nbytes // weight.count)
            for whole in weight.parts.values()
        )
        job = PackJob(
            rows.data_ptr(),
            *parts,
            first,
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
