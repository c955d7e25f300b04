"""Packers, which store weights in a provider's layout while a checkpoint is read."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from penstock.config.weights import DeviceScheme, Stored, WeightFormat, device_format
from penstock.kernels.coded_rows import CodedRows
from penstock.kernels.linear import DenseWeight
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.packer import NativePacking, SectionPacker
from penstock.kernels.native_limits import unsupported_quantization
from penstock.kernels.ops import LINEAR
from penstock.kernels.registry import Needs, Platform
from penstock.kernels.triton.repack import put_codes, put_stored
from penstock.kernels.triton.weights import (
    CodedWeight,
    JoinedWeight,
    QuantizedWeight,
    check_rows,
    empty_codes,
    empty_weight,
    write_fp8_rows,
    write_rows,
)

Kind = Literal["matrix", "gated", "vocabulary", "router", "table"]
Sections = Sequence[tuple[int, Stored]]


class Packer(Protocol):
    """Packs a weight [n, k], which arrives by rows."""

    def put(self, start: int, rows: Tensor) -> None:
        """Pack the rows from `start` on: contiguous, in any floating dtype. Several threads may call at once, each with
        rows of its own. `rows` may be overwritten afterwards. Raises ValueError for rows that cannot be quantised."""

    def finish(self) -> Any:
        """Return the weight, which `Linear.pack` takes. All rows must have been put."""


@runtime_checkable
class CodePacker(Packer, Protocol):
    """Packs rows of floats, and rows that have codes already."""

    def put_stored(self, start: int, rows: Tensor, dtype: str) -> None:
        """Like `put`, for rows as a GGUF file holds them, of a type of penstock.gguf: uint8 [rows, bytes of a row], on
        the CPU."""

    def put_codes(self, start: int, rows: CodedRows) -> None:
        """Like `put`, for codes of a format. Raises ValueError if a scale is not finite, or not exact in the weight's
        format."""


@runtime_checkable
class ScaledPacker(Packer, Protocol):
    """Packs rows of floats, and rows of FP8 that have one scale each."""

    def put_scaled(self, start: int, codes: Tensor, scales: Tensor) -> None:
        """Like `put`, for rows of codes of E4M3, uint8 [rows, k], which their scales, fp32 [rows], multiply."""


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
    """Quantises a weight [n, k] on the device, for a GPU's products (see triton/weights.py). Provides ScaledPacker: a
    weight of FP8 keeps codes of FP8, others quantise their values. Rows that cannot be
    quantised are found by `finish`: an earlier check would block on the device."""

    def __init__(self, shape: tuple[int, int], scheme: DeviceScheme, group: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._weight = empty_weight(*shape, scheme, group, device)

    def put(self, start: int, rows: Tensor) -> None:
        write_rows(self._weight, start, rows)

    def put_scaled(self, start: int, codes: Tensor, scales: Tensor) -> None:
        write_fp8_rows(self._weight, start, codes, scales)

    def finish(self) -> QuantizedWeight | CodedWeight:
        check_rows(self._weight)
        return self._weight


class CodedPacker:
    """Keeps the codes of a checkpoint for a GPU's products (see triton/repack.py). Provides CodePacker."""

    def __init__(self, shape: tuple[int, int], fmt: WeightFormat, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._weight = empty_codes(*shape, fmt, device)

    def put(self, start: int, rows: Tensor) -> None:
        raise TypeError("a weight of codes is made of rows that have codes")

    def put_stored(self, start: int, rows: Tensor, dtype: str) -> None:
        put_stored(self._weight, start, rows, dtype)

    def put_codes(self, start: int, rows: CodedRows) -> None:
        put_codes(self._weight, start, rows)

    def finish(self) -> CodedWeight:
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
    codes = bool(instruction_sets())  # without native code, nothing decodes the blocks of a GGUF file

    def single(shape: tuple[int, ...], fmt: DeviceScheme | WeightFormat) -> Packer:
        if fmt == "bf16" or fmt == "f32":
            return DensePacker(shape, getattr(torch, dtype), device)
        if isinstance(fmt, WeightFormat):
            return CodedPacker((shape[0], shape[1]), fmt, device)
        return QuantizedPacker((shape[0], shape[1]), fmt, group, device)

    def packer(
        shape: tuple[int, ...], kind: Kind, experts: int = 1, sections: Sections = (), *, sensitive: bool = False
    ) -> Packer:
        parts = [
            (rows, device_format(kind, stored if codes else (), dtype, quantization))
            for rows, stored in sections or ((shape[0], ()),)
        ]
        if len({fmt for _, fmt in parts}) == 1:
            return single(shape, parts[0][1])
        packers = [(rows, single((rows, *shape[1:]), fmt)) for rows, fmt in parts]
        return SectionPacker(packers, _joined)

    return packer


def _joined(sections: tuple[Any, ...]) -> JoinedWeight:
    return JoinedWeight(tuple(DenseWeight(each, None) if isinstance(each, Tensor) else each for each in sections))
