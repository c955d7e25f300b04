"""Quantised weights for a GPU's products, and their packing in plain torch, on any device.

Values are symmetric around 0 and rounded to the nearest; unlike the CPU's grouped weights they have no minimum. int8
has a scale per output column, int4 one (fp16) per group of values along k. fp8 (e4m3) has scales like int8. Layouts:

- int8 and fp8: [n, k], as in a checkpoint. Tensor cores read both operands with k contiguous.
- int4: bytes [padded k / 2, n] of two values plus 8 each. Byte 32 b + j of a column has value 64 b + j in its low half
  and value 64 b + 32 + j in its high half, so each half of a tile of bytes is a tile of consecutive values, and
  neighbouring threads read neighbouring columns. Scales are [padded k / group, n]. k is padded to a multiple of 128.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.weights import INT4_MULTIPLE
from penstock.config.weights import DeviceScheme as Scheme
from penstock.kernels.linear import DenseWeight

HALF = 32  # values in one half of a run of bytes


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight of fp8 or int8 values [n, k]."""

    values: Tensor
    scales: Tensor  # fp32 [n]
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.values.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.bias) if tensor is not None)


@dataclass(frozen=True)
class Int4Weight:
    """A weight [n, k] of int4 values."""

    values: Tensor  # uint8 [padded k / 2, n]
    scales: Tensor  # fp16 [padded k / group, n]
    group: int
    k: int
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[1], self.k

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.bias) if tensor is not None)


Weight = DenseWeight | QuantizedWeight | Int4Weight


def empty_weight(
    n: int, k: int, scheme: Scheme, group: int, device: torch.device | str
) -> QuantizedWeight | Int4Weight:
    """Memory for a weight [n, k]."""
    if scheme != "int4":
        dtype = torch.float8_e4m3fn if scheme == "fp8" else torch.int8
        values = torch.empty(n, k, dtype=dtype, device=device)
        return QuantizedWeight(values, torch.empty(n, dtype=torch.float32, device=device))
    padded = -(-k // INT4_MULTIPLE) * INT4_MULTIPLE
    values = torch.empty(padded // 2, n, dtype=torch.uint8, device=device)
    return Int4Weight(values, torch.empty(padded // group, n, dtype=torch.float16, device=device), group, k)


def put_rows(weight: QuantizedWeight | Int4Weight, start: int, rows: Tensor) -> None:
    """Quantise rows [count, k] into the weight from row `start` on. ValueError if one is not finite or too large."""
    write_rows(weight, start, rows)
    check_rows(weight, start, start + len(rows))


def check_rows(weight: QuantizedWeight | Int4Weight, start: int = 0, stop: int | None = None) -> None:
    """Raise ValueError if one of the rows [start, stop) is not finite or too large. Blocks on the device."""
    if not bool(torch.isfinite(weight.scales[..., start:stop]).all()):
        last = (weight.scales.shape[-1] if stop is None else stop) - 1
        raise ValueError(
            f"rows {start} to {last} hold infinity or NaN, or are too large to quantise: use --quantization none"
        )


def write_rows(weight: QuantizedWeight | Int4Weight, start: int, rows: Tensor) -> None:
    """`put_rows` without the check. A row that is not finite or too large gets a scale that is not finite."""
    part = slice(start, start + len(rows))
    wide = rows.to(weight.values.device).float()
    if isinstance(weight, Int4Weight):
        values, scales = _int4(wide, weight.group, weight.values.shape[0] * 2)
        weight.values[:, part], weight.scales[:, part] = values.t(), scales.t()
    else:
        eight_bits = weight.values.dtype == torch.int8
        scales = wide.abs().amax(1) / (127 if eight_bits else 448)
        values = wide / scales.clamp_min(1e-30)[:, None]
        weight.values[part] = (values.round_() if eight_bits else values).to(weight.values.dtype)
        weight.scales[part] = scales


def pack(weight: Tensor, scheme: Scheme, group: int = 32, bias: Tensor | None = None) -> QuantizedWeight | Int4Weight:
    """Quantise a dense weight [n, k] with its bias [n], on its device."""
    packed = empty_weight(weight.shape[0], weight.shape[1], scheme, group, weight.device)
    put_rows(packed, 0, weight)
    return packed if bias is None else replace(packed, bias=bias)


def dense(weight: QuantizedWeight | Int4Weight, start: int = 0, stop: int | None = None) -> Tensor:
    """The dequantised rows [start, stop) of a weight, in fp32."""
    if isinstance(weight, QuantizedWeight):
        return weight.values[start:stop].float() * weight.scales[start:stop, None]
    runs = weight.values[:, start:stop].unflatten(0, (-1, HALF))
    values = torch.stack([runs & 15, runs >> 4], 1).flatten(0, 2).float() - 8
    scales = weight.scales[:, start:stop].float().repeat_interleave(weight.group, 0)
    return (values * scales)[: weight.k].t()


def _int4(rows: Tensor, group: int, padded: int) -> tuple[Tensor, Tensor]:
    """(bytes [count, padded / 2], scales [count, padded / group]) of fp32 rows. The scale makes the largest value of a
    group -8 or 7."""
    groups = F.pad(rows, (0, padded - rows.shape[1])).unflatten(1, (-1, group))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scales = (largest / -8 + 0.0).half()  # a group of zeros has no sign
    factors = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    values = (groups * factors[..., None]).round_().clamp_(-8, 7).to(torch.int16).flatten(1) + 8
    runs = values.unflatten(1, (-1, 2, HALF))
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1).to(torch.uint8), scales
