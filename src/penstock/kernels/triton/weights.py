"""Quantised weights for a GPU's products, and their packing in plain torch, on any device.

When floats are quantised, the codes are symmetric around 0 and rounded to the nearest. int8 and fp8 (e4m3) have a scale
per output column, int4 one (fp16) per group of values along k. The codes of a GGUF file stay as they are, with the
scales and minima of their groups (see WeightFormat and repack.py). Layouts:

- int8 and fp8: [n, k], as in a checkpoint. Tensor cores read both operands with k contiguous.
- codes, int4 among them: one byte, or half of one, for each value: [padded k, n] or [padded k / 2, n]. Neighbouring
  threads read neighbouring columns. k is cut into runs of two halves of H values: H is 32, or 16 for groups of 16. A
  run of half bytes has H bytes of a column: byte j has the run's value j in its low half, value H + j in its high half.
  So each half of a tile of bytes is a tile of consecutive values. Scales are [padded k / group, n]; `device_width` is
  the padded k. In the padding scales and minima are 0.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.weights import SUPER, WeightFormat, device_half, device_int4, device_width
from penstock.config.weights import DeviceScheme as Scheme
from penstock.kernels.linear import DenseWeight

_SCALES = {"f16": torch.float16, "f32": torch.float32, "two_levels": torch.int8}


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
class CodedWeight:
    """A weight [n, k] of codes of 4 or 8 bits: scale * (code - zero) + minimum, by groups along k."""

    codes: Tensor  # uint8 [padded k / values of a byte, n]
    scales: Tensor  # [padded k / group, n]: fp16 or fp32; with two levels int8, which super_scales multiply
    super_scales: Tensor | None  # fp16 [padded k / 256, n]
    mins: Tensor | None  # like scales
    super_mins: Tensor | None
    format: WeightFormat
    k: int
    bias: Tensor | None = None
    order: Tensor | None = None  # int32 [k], of an ordered format: the column of x that each one is multiplied with

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[1], self.k

    @property
    def factors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Scales and minima, each with its second level."""
        return self.scales, self.super_scales, self.mins, self.super_mins

    @property
    def half(self) -> int:
        """The values along k of half a run."""
        return device_half(self.format)

    @property
    def runs(self) -> int:
        return device_width(self.k, self.format) // (2 * self.half)

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return (self.codes, *self.factors, self.bias, self.order)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors if tensor is not None)


@dataclass(frozen=True)
class JoinedWeight:
    """Weights with the same k, one below the other. Each has a format of its own."""

    sections: "tuple[SingleWeight, ...]"

    @property
    def nbytes(self) -> int:
        return sum(section.nbytes for section in self.sections)


SingleWeight = DenseWeight | QuantizedWeight | CodedWeight
Weight = SingleWeight | JoinedWeight


def empty_codes(n: int, k: int, fmt: WeightFormat, device: torch.device | str) -> CodedWeight:
    """Memory for a weight [n, k] of codes. It is zeroed, so scales and minima of the padding are 0."""
    width = device_width(k, fmt)

    def zeros(rows: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, n, dtype=dtype, device=device)

    def factors(exists: bool) -> tuple[Tensor | None, Tensor | None]:
        first = zeros(width // fmt.group, _SCALES[fmt.scales]) if exists else None
        return first, zeros(-(-width // SUPER), torch.float16) if exists and fmt.scales == "two_levels" else None

    (scales, super_scales), (mins, super_mins) = factors(True), factors(fmt.mins)
    assert scales is not None
    codes = zeros(width * fmt.bits // 8, torch.uint8)
    order = torch.zeros(k, dtype=torch.int32, device=device) if fmt.ordered else None
    return CodedWeight(codes, scales, super_scales, mins, super_mins, fmt, k, order=order)


def empty_weight(
    n: int, k: int, scheme: Scheme, group: int, device: torch.device | str
) -> QuantizedWeight | CodedWeight:
    """Memory for a weight [n, k] that is packed from floats."""
    if scheme == "int4":
        return empty_codes(n, k, device_int4(group), device)
    dtype = torch.float8_e4m3fn if scheme == "fp8" else torch.int8
    values = torch.empty(n, k, dtype=dtype, device=device)
    return QuantizedWeight(values, torch.empty(n, dtype=torch.float32, device=device))


def check_rows(weight: QuantizedWeight | CodedWeight) -> None:
    """Raise ValueError if a row is not finite or too large. Blocks on the device."""
    if not bool(torch.isfinite(weight.scales).all()):
        last = weight.scales.shape[-1] - 1
        raise ValueError(
            f"rows 0 to {last} hold infinity or NaN, or are too large to quantise: use --quantization none"
        )


def write_rows(weight: QuantizedWeight | CodedWeight, start: int, rows: Tensor) -> None:
    """Quantise rows [count, k] into the weight from row `start` on. A row that is not finite or too large gets a scale
    that is not finite."""
    part = slice(start, start + len(rows))
    if isinstance(weight, CodedWeight):
        codes, scales = _int4(rows.to(weight.codes.device).float(), weight.format.group, weight.runs * 2 * weight.half)
        weight.codes[:, part], weight.scales[:, part] = codes, scales
        return
    wide = rows.to(weight.values.device).float()
    eight_bits = weight.values.dtype == torch.int8
    scales = wide.abs().amax(1) / (127 if eight_bits else 448)
    values = wide / scales.clamp_min(1e-30)[:, None]
    weight.values[part] = (values.round_() if eight_bits else values).to(weight.values.dtype)
    weight.scales[part] = scales


def write_fp8_rows(weight: QuantizedWeight | CodedWeight, start: int, codes: Tensor, scales: Tensor) -> None:
    """`write_rows` for codes of E4M3, uint8 [count, k], times a scale for each row, fp32 [count]. A weight of FP8 keeps
    them. A row with NaN gets a scale that is not finite."""
    values = codes.view(torch.float8_e4m3fn)
    if isinstance(weight, QuantizedWeight) and weight.values.dtype == values.dtype:
        part = slice(start, start + len(codes))
        weight.values[part] = values
        weight.scales[part] = scales.masked_fill((codes & 127 == 127).any(1), torch.nan)
    else:
        write_rows(weight, start, values.float() * scales[:, None])


def pack_codes(codes: Tensor, fmt: WeightFormat) -> Tensor:
    """Codes [padded k, rows] as a CodedWeight holds them."""
    if fmt.bits == 8:
        return codes
    runs = codes.unflatten(0, (-1, 2, device_half(fmt)))
    pairs: Tensor = runs[:, 0] | runs[:, 1] << 4
    return pairs.flatten(0, 1)


def _int4(rows: Tensor, group: int, padded: int) -> tuple[Tensor, Tensor]:
    """(codes [padded / 2, count], scales [padded / group, count]) of fp32 rows. The scale makes the largest value of a
    group -8 or 7."""
    groups = F.pad(rows, (0, padded - rows.shape[1])).unflatten(1, (-1, group))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scales = (largest / -8 + 0.0).half()  # a group of zeros has no sign
    factors = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    values = (groups * factors[..., None]).round_().clamp_(-8, 7) + 8
    return pack_codes(values.flatten(1).t().to(torch.uint8), device_int4(group)), scales.t()
