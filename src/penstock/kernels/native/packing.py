"""Weights packed for the native kernels (see Format in cpp/ops.h)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config.weights import WeightFormat
from penstock.kernels.native.layout import Layout, Parts, native_format
from penstock.kernels.native.structs import Matrix


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight [n, k] and its bias. Every 16 columns of a gated weight are 8 of the gate and 8 of the other
    half."""

    lines: Tensor  # uint8
    column_scales: Tensor | None  # int16, and scales by column: fp32 [n padded]
    scales: Tensor | None  # grouped: [blocks, groups, 16], as are minima
    mins: Tensor | None
    super_scales: Tensor | None  # two levels: fp16 [blocks, supers, 16]
    super_mins: Tensor | None
    bias: Tensor | None  # fp32 [count * n padded]
    n: int
    k: int
    format: WeightFormat
    gated: bool = False
    count: int = 1  # weights [n, k] that lie one behind the other: those of experts
    order: Tensor | None = None  # int32 [k]: the column of x that each column is multiplied with; None: its own

    @property
    def parts(self) -> dict[str, Tensor | None]:
        """The tensors by name, in the order of `Matrix`, without the bias."""
        names = ("lines", "column_scales", "scales", "mins", "super_scales", "super_mins")
        return {name: getattr(self, name) for name in names}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (*self.parts.values(), self.bias, self.order) if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def sections(self) -> "tuple[PackedWeight, ...]":
        return (self,)

    @cached_property
    def matrix(self) -> Matrix:
        """The weight as ops read it. It is made once, since the memory of the tensors never moves."""
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in self.parts.values())
        return Matrix(*pointers, self.n, self.k, native_format(self.format))


@dataclass(frozen=True)
class SectionedWeight:
    """Packed weights of one k below each other. Each has a format of its own."""

    sections: tuple[PackedWeight, ...]

    @property
    def n(self) -> int:
        return sum(section.n for section in self.sections)

    @property
    def nbytes(self) -> int:
        return sum(section.nbytes for section in self.sections)


def packed_weight(layout: Layout, parts: Parts, order: NDArray[np.int32] | None = None) -> PackedWeight:
    """A PackedWeight that shares the memory of the parts. `order`: see there."""
    tensors = {
        name: None if part is None else torch.from_numpy(part).flatten(0, 1 if part.ndim == 4 else -1)
        for name, part in parts.items()
    }
    lines = tensors.pop("lines")
    assert lines is not None
    return PackedWeight(
        lines.view(-1),
        **tensors,
        bias=None,
        order=None if order is None else torch.from_numpy(order),
        n=layout.n,
        k=layout.k,
        format=layout.format,
        gated=layout.gated,
        count=layout.count,
    )
