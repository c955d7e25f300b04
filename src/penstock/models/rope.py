"""Computes the frequencies of rotary position embedding for a RopeSpec."""

import math

import torch
from torch import Tensor

from penstock.families import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Returns radians per position, fp32 [head_dim / 2]. Operations are in the same order as in transformers, so that
    results round in the same way."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.scaling == "linear":
        return frequencies / spec.factor
    if spec.scaling == "llama3":
        return _llama3(frequencies, spec)
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
