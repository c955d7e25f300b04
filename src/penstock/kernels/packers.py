"""Packers, which store weights in a provider's layout while a checkpoint is read."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.config.weights import DeviceScheme, schemes, unquantized
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.packer import NativePacking
from penstock.kernels.native_limits import unsupported_quantization
from penstock.kernels.ops import LINEAR
from penstock.kernels.registry import Needs, Platform
from penstock.kernels.triton.weights import (
    Int4Weight,
    QuantizedWeight,
    check_rows,
    empty_weight,
    write_rows,
)

Kind = Literal["matrix", "gated", "vocabulary", "router", "table"]
Sections = Sequence[tuple[int, Sequence[str]]]


class Packer(Protocol):
    """Packs a weight [n, k], which arrives by rows."""

    def put(self, start: int, rows: Tensor) -> None:
        """Pack the rows from `start` on: contiguous, in any floating dtype. Several threads may call at once, each with
        rows of its own. `rows` may be overwritten afterwards. Raises ValueError for rows that cannot be quantised."""
        ...

    def finish(self) -> Any:
        """Return the weight, which `Linear.pack` takes. All rows must have been put."""
        ...


class Packing(Protocol):
    """Makes the packer of each of a model's weights."""

    def __call__(
        self,
        shape: tuple[int, ...],
        kind: Kind,
        experts: int = 1,
        sections: Sections = (),
        *,
        sensitive: bool = False,
    ) -> Packer:
        """A packer for a weight of a shape and kind (see families.Parameter.kind), of `experts` stacked below each
        other. `sections` are those of families.Parameter; (): one, of floats. `sensitive`: see
        config.weights.cpu_format."""
        ...


class DensePacker:
    """Packs a tensor of any shape by converting it to a dtype."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        """Allocates on `device`, or in `memory`, which is on the CPU."""
        with torch.inference_mode(False):  # other threads write to it, and the caller's mode does not hold for them
            if memory is None:
                self._tensor = torch.empty(shape, dtype=dtype, device=device)
            else:
                size = math.prod(shape) * dtype.itemsize
                self._tensor = torch.from_numpy(memory.empty((size,), np.uint8)).view(dtype).view(shape)

    def put(self, start: int, rows: Tensor) -> None:
        into = (self._tensor if self._tensor.dim() else self._tensor.view(1))[start : start + len(rows)]
        into.copy_(rows.reshape(into.shape))

    def finish(self) -> Tensor:
        return self._tensor


class QuantizedPacker:
    """Quantises a weight [n, k] on the device, for a GPU's products (see triton/weights.py). Rows that cannot be
    quantised are found by `finish`: an earlier check would block on the device."""

    def __init__(self, shape: tuple[int, int], scheme: DeviceScheme, group: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._weight = empty_weight(*shape, scheme, group, device)

    def put(self, start: int, rows: Tensor) -> None:
        write_rows(self._weight, start, rows)

    def finish(self) -> QuantizedWeight | Int4Weight:
        check_rows(self._weight)
        return self._weight


class CannotQuantize(ValueError):
    """No provider here supports the quantisation; the message says why and what to change."""


def select_packing(
    platform: Platform,
    needs: Needs,
    quantization: str = "none",
    group: int = 32,
    device: torch.device | None = None,
) -> Packing:
    """Select the packing for the linear provider that `select_kernels` chooses. Starts no threads. `device` is where
    the weights lie, by default the platform's.

    Raises CannotQuantize.
    """
    if platform.device == "cuda":
        dtype = str(needs.dtype).removeprefix("torch.")
        return _on_device(dtype, quantization, group, device or torch.device(platform.device))
    if LINEAR.select(platform, needs).name == "native":
        return NativePacking(str(needs.dtype).removeprefix("torch."), quantization, group, platform.isa)
    if quantization != "none":
        dtype = str(needs.dtype).removeprefix("torch.")
        raise CannotQuantize(unsupported_quantization(quantization, dtype, built=bool(platform.isa)))
    weights = WeightMemory()
    return lambda shape, kind, experts=1, sections=(), *, sensitive=False: DensePacker(
        shape, needs.dtype, memory=weights
    )


def _on_device(dtype: str, quantization: str, group: int, device: torch.device) -> Packing:
    matrices, vocabulary = schemes(dtype, quantization)
    by_kind = {"vocabulary": vocabulary, "router": unquantized(dtype)}

    def packer(
        shape: tuple[int, ...], kind: Kind, experts: int = 1, sections: Sections = (), *, sensitive: bool = False
    ) -> Packer:
        scheme = by_kind.get(kind, matrices)
        if scheme == "bf16" or scheme == "f32":
            return DensePacker(shape, getattr(torch, dtype), device)
        return QuantizedPacker((shape[0], shape[1]), scheme, group, device)

    return packer
