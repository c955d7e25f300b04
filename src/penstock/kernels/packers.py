"""How a model holds its weights, and the packing of each while it is read."""

import math
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.config.weights import Scheme, schemes, unquantized
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.packer import NativePacking
from penstock.kernels.ops import LINEAR
from penstock.kernels.registry import Needs, Platform
from penstock.kernels.triton.weights import (
    Int4Weight,
    QuantizedWeight,
    check_rows,
    empty_weight,
    write_rows,
)

Kind = Literal["matrix", "gated", "vocabulary", "router"]


class Packer(Protocol):
    """Takes a weight [n, k] by rows and packs them where they belong."""

    def put(self, start: int, rows: Tensor) -> None:
        """Rows from `start` on, contiguous, in any floating dtype. Any thread may call, each with rows of its own;
        `rows` may be overwritten after. Raises ValueError for rows that cannot be quantised."""
        ...

    def finish(self) -> Any:
        """The weight as `Linear.pack` takes it, once all rows were put."""
        ...


class Packing(Protocol):
    """How a model holds its weights."""

    def __call__(self, shape: tuple[int, ...], kind: Kind, experts: int = 1) -> Packer:
        """For a weight of a shape and kind (see families.Parameter.kind), of so many experts below each other."""
        ...


class DensePacker:
    """A tensor of any shape as it is, converted to a dtype."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        """In `memory`, which is on the CPU, where it is given."""
        with torch.inference_mode(False):  # other threads, which the caller's mode does not reach, will write to it
            if memory is None:
                self._tensor = torch.empty(shape, dtype=dtype, device=device)
            else:
                size = math.prod(shape) * dtype.itemsize
                self._tensor = torch.from_numpy(memory.empty((size,), np.uint8)).view(dtype).view(shape)

    def put(self, start: int, rows: Tensor) -> None:
        self._tensor[start : start + len(rows)].copy_(rows)

    def finish(self) -> Tensor:
        return self._tensor


class QuantizedPacker:
    """A weight [n, k] as a GPU's products read it (see triton/weights.py), quantised where the rows are. What cannot be
    quantised is found at the end: to look sooner would be to wait for the device."""

    def __init__(self, shape: tuple[int, int], scheme: Scheme, group: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._weight = empty_weight(*shape, scheme, group, device)

    def put(self, start: int, rows: Tensor) -> None:
        write_rows(self._weight, start, rows)

    def finish(self) -> QuantizedWeight | Int4Weight:
        check_rows(self._weight)
        return self._weight


class CannotQuantize(ValueError):
    """Nothing here multiplies quantised weights; the message says why and what to change."""


def select_packing(
    platform: Platform,
    needs: Needs,
    quantization: str = "none",
    group: int = 32,
    device: torch.device | None = None,
) -> Packing:
    """As the linear provider that `select_kernels` chooses reads weights. Starts no threads. `device` is where weights
    lie; None: where the platform's do.

    Raises CannotQuantize.
    """
    if platform.device == "cuda":
        dtype = str(needs.dtype).removeprefix("torch.")
        return _on_device(dtype, quantization, group, device or torch.device(platform.device))
    if LINEAR.select(platform, needs).name == "native":
        return NativePacking(str(needs.dtype).removeprefix("torch."), quantization, group, platform.isa)
    if quantization != "none":
        why = (
            f"do not compute in {str(needs.dtype).removeprefix('torch.')}; set --dtype bfloat16"
            if platform.isa
            else "are not there: they take an x86-64 processor with AVX2, and a C++ compiler when penstock is "
            "installed; see to these"
        )
        raise CannotQuantize(
            f"--quantization {quantization} needs the native kernels, which {why}, or set --quantization none"
        )
    weights = WeightMemory()
    return lambda shape, kind, experts=1: DensePacker(shape, needs.dtype, memory=weights)


def _on_device(dtype: str, quantization: str, group: int, device: torch.device) -> Packing:
    matrices, vocabulary = schemes(dtype, quantization)
    by_kind = {"vocabulary": vocabulary, "router": unquantized(dtype)}

    def packer(shape: tuple[int, ...], kind: Kind, experts: int = 1) -> Packer:
        scheme = by_kind.get(kind, matrices)
        if scheme == "bf16" or scheme == "f32":
            return DensePacker(shape, getattr(torch, dtype), device)
        return QuantizedPacker((shape[0], shape[1]), scheme, group, device)

    return packer
