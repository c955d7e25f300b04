"""Computes the frequencies of rotary position embedding for a RopeSpec."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.families import RopeSpec


def rotary_frequencies(spec: RopeSpec, head_dim: int, context: int) -> Tensor:
    """Returns fp32 [2, head_dim / 2]: radians per position, and what cosine and sine are multiplied by. Elements that
    are not rotated come last, with 0 radians and the factor 1. `context`: the most tokens of a sequence."""
    radians = inverse_frequencies(spec, spec.dims or head_dim, context)
    factors = torch.full_like(radians, spec.attention_factor)
    rest = head_dim // 2 - len(radians)
    return torch.stack((F.pad(radians, (0, rest)), F.pad(factors, (0, rest), value=1.0)))


def inverse_frequencies(spec: RopeSpec, dims: int, context: int = 0) -> Tensor:
    """Returns radians per position of the rotated elements, fp32 [dims / 2]. Operations are in the same order as in
    transformers, so that results round in the same way."""
    if spec.scaling == "off":
        return torch.zeros(dims // 2)
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
    if spec.scaling == "longrope":
        factors = spec.long_factors if context > spec.original_max_position else spec.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.scaling == "linear":
        return frequencies / spec.factor
    if spec.scaling == "proportional":
        return frequencies.masked_fill(torch.arange(dims // 2) >= spec.turning, 0.0) / spec.factor
    if spec.scaling == "llama3":
        return _llama3(frequencies, spec)
    if spec.scaling == "yarn":
        return _yarn(spec.theta**exponents, spec, dims)
    return frequencies


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Scales frequencies for long contexts as Llama 3.1 does: low ones are divided by the factor, high ones are kept,
    and those between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest = spec.original_max_position / spec.low_freq_factor
    shortest = spec.original_max_position / spec.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / spec.factor, frequencies)
    smooth = (spec.original_max_position / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - smooth) * scaled / spec.factor + smooth * scaled
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, scaled)


def _yarn(wavelengths: Tensor, spec: RopeSpec, dims: int) -> Tensor:
    """Scales frequencies as YaRN does (Peng et al., 2023). `wavelengths` are in radians."""

    def place(turns: float) -> float:
        """The index, times 2, of the frequency that turns so often in the original context."""
        return dims * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = place(spec.fast), place(spec.slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (spec.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
