"""The scaling of rope in a GGUF file, as config.json describes it."""

import math
from collections.abc import Sequence
from typing import Any

from penstock.families.gguf.keys import LATENT, GgufKeys, shortest
from penstock.families.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from penstock.families.hf_config import HFConfig, UnsupportedModel
from penstock.gguf import read_floats

# All published models with this scaling use these values. A file holds only the factors that result from them.
_LOW, _HIGH = 1.0, 4.0
_PUBLISHED_POSITIONS = 8192
_STILL = 1e30  # a frequency divided by it turns nothing
_TOLERANCE = 2e-5  # the factors are computed in float32: near the upper end of the blend they have errors of 1e-6


def scaling_of(keys: GgufKeys) -> dict[str, Any] | None:
    """The scaling that the metadata or the tensors of factors describe; None without any."""
    if LONG_FACTORS in keys.tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(keys, LONG_FACTORS),
            "short_factor": _factors(keys, SHORT_FACTORS),
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
            "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        }
    if ROPE_FACTORS not in keys.tensors:
        return rope_scaling(keys.all, keys.architecture)
    factors = _factors(keys, ROPE_FACTORS)
    if max(factors) >= _STILL:
        return _proportional(factors, ROPE_FACTORS)
    return llama3_scaling(factors, keys.number("rope.freq_base", 10000.0), ROPE_FACTORS)


def _factors(keys: GgufKeys, name: str) -> list[float]:
    """The divisors of rope's frequencies."""
    tensor, count = keys.tensors.get(name), keys.integer("rope.dimension_count", keys.head_dim) // 2
    if tensor is None or tensor.type.name != "F32" or tensor.shape != (count,):
        found = "missing" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise UnsupportedModel(f"{name} is {found}; expected F32 [{count}]")
    return [shortest(factor) for factor in read_floats(tensor)]


def _proportional(factors: Sequence[float], where: str) -> dict[str, Any]:
    """The scaling "proportional", of which the first pairs of a head turn and the others do not."""
    turning = factors.count(1.0)
    if any(factor != 1.0 for factor in factors[:turning]) or any(factor < _STILL for factor in factors[turning:]):
        raise UnsupportedModel(
            f"{where}: the factors of rope, {min(factors):g} to {max(factors):g}, are not those of a known scaling; "
            f"supported: 1 of the first pairs, {_STILL:g} of the others"
        )
    # A quarter of a pair more, so that the product with the size is not less than the number for rounding.
    return {"rope_type": "proportional", "partial_rotary_factor": min((turning + 0.25) / len(factors), 1.0)}


def rope_scaling(keys: HFConfig, architecture: str) -> dict[str, Any] | None:
    """The scaling that the metadata describes; None without any. A family refuses a kind that it does not support."""
    prefix = f"{architecture}.rope.scaling"
    factor = f"{prefix}.factor"
    if keys.get(factor) is None:
        factor = f"{architecture}.rope.scale_linear"  # its name in old files
    kind = keys.text(f"{prefix}.type", "none" if keys.get(factor) is None else "linear")
    if kind == "none" or (kind == "linear" and keys.get(factor) is None):
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    if keys.get(factor) is not None:
        scaling["factor"] = keys.number(factor)
    if keys.get(f"{prefix}.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = keys.integer(f"{prefix}.original_context_length")
    for theirs, name in (("attn_factor", "attention_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        if kind == "yarn" and keys.get(f"{prefix}.yarn_{theirs}") is not None:
            scaling[name] = keys.number(f"{prefix}.yarn_{theirs}")
    multiplier = f"{prefix}.yarn_log_multiplier"
    if architecture in LATENT and keys.get(multiplier):
        # A tenth of mscale_all_dim. A file does not have mscale, which is equal in all published models.
        grows = round(10 * keys.number(multiplier), 6)
        scaling |= {"mscale": grows, "mscale_all_dim": grows}
    elif architecture == "mistral3" and keys.get(multiplier):
        scaling |= {"mscale": 1.0, "mscale_all_dim": keys.number(multiplier)}  # as llama.cpp assumes
    if keys.number(f"{prefix}.attn_factor", 1.0) != 1.0:
        raise keys.unsupported(f"{prefix}.attn_factor", keys.get(f"{prefix}.attn_factor"), "1")
    return scaling


def llama3_scaling(factors: Sequence[float], theta: float, where: str) -> dict[str, Any] | None:
    """The scaling "llama3" whose frequencies are divided by `factors`; None if these are all 1.

    Source: generate_extra_tensors of llama.cpp's convert_hf_to_gguf.py. Raises UnsupportedModel if the factors are not
    of that form.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    divided = max(factors)
    waves = [2 * math.pi * theta ** (i / len(factors)) for i in range(len(factors))]
    for positions in _candidates(factors, waves, divided):
        expected = [_factor(wave, divided, positions) for wave in waves]
        if all(abs(a - b) <= _TOLERANCE * b for a, b in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": divided,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": positions,
            }
    raise UnsupportedModel(
        f"{where}: the factors of rope, {min(factors):g} to {divided:g}, are not those of a known scaling; supported: "
        f"llama3 with low_freq_factor {_LOW:g} and high_freq_factor {_HIGH:g}"
    )


def _candidates(factors: Sequence[float], waves: Sequence[float], divided: float) -> list[int]:
    """Values that original_max_position_embeddings may have: each factor between 1 and the largest gives one."""
    found = []
    for factor, wave in zip(factors, waves, strict=True):
        if 1.0 < factor < divided:
            smooth = (1 / factor - 1 / divided) / (1 - 1 / divided)
            found.append(round(wave * (smooth * (_HIGH - _LOW) + _LOW)))
    return list(dict.fromkeys([*found, _PUBLISHED_POSITIONS]))


def _factor(wave: float, divided: float, positions: int) -> float:
    if wave < positions / _HIGH:
        return 1.0
    if wave > positions / _LOW:
        return divided
    smooth = (positions / wave - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / divided + smooth)
