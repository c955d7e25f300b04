"""The rope of a configuration: `rope_parameters`, before transformers 5 `rope_theta` and `rope_scaling`."""

import math
from dataclasses import replace

from penstock.families.hf_config import MAX_INTEGER, HFConfig
from penstock.families.kinds.attention import RopeSpec

NO_ROPE = RopeSpec(scaling="off")
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def rope(
    config: HFConfig, theta: float = 10000.0, *, partial: float | None = None, interleaved: bool = False
) -> RopeSpec:
    """One rope for all layers. `theta` and `partial` are the family's defaults: of rope_theta, and of the part of a
    head that is rotated (None: always all of it)."""
    parameters = config.section("rope_scaling") or config.section("rope_parameters") or HFConfig({})
    if parameters.get("full_attention") is not None:
        raise config.unsupported("rope_parameters", "one per layer type", "one for all layers of this architecture")
    theta = config.number("rope_theta", theta)
    return replace(rope_of(parameters, config, theta, partial=partial), interleaved=interleaved)


def rope_of_layers(config: HFConfig, layer_type: str, scaling: HFConfig | None, theta: float) -> RopeSpec:
    """The rope of one type of layers: transformers 5 nests `rope_parameters` by it. `scaling` is what stands for it
    before, and `theta` the default of rope_theta."""
    nested = config.section("rope_parameters")
    parameters = scaling or (nested and nested.section(layer_type)) or HFConfig({})
    return rope_of(parameters, config, theta)


def rope_of(parameters: HFConfig, config: HFConfig, theta: float, *, partial: float | None = None) -> RopeSpec:
    """The RopeSpec of one set of parameters. `theta` and `partial` are as in `rope`."""
    theta = parameters.number("rope_theta", theta)
    if parameters.get("rope_type") == "proportional":
        return _proportional(parameters, config, theta)
    name = "partial_rotary_factor"
    part = parameters.number(name, config.number(name, 1.0 if partial is None else partial))
    if partial is None and part != 1.0:
        raise config.unsupported(name, part, "1.0")
    dims = _dims(config, part)
    name = "rope_type" if parameters.get("rope_type") is not None else "type"
    kind = parameters.text(name, "default")
    # "dynamic" is the default up to max_position_embeddings, and no more positions are served.
    if kind in ("default", "dynamic"):
        return RopeSpec(theta=theta, dims=dims)
    if kind == "linear":
        return RopeSpec(theta=theta, scaling="linear", factor=parameters.number("factor"), dims=dims)
    if kind == "llama3":
        return _llama3(parameters, config, theta, dims)
    if kind == "yarn":
        return _yarn(parameters, config, theta, dims)
    if kind in ("longrope", "su"):
        return _longrope(parameters, config, theta, dims)
    raise parameters.unsupported(name, kind, ", ".join(KINDS))


def context_length(config: HFConfig, positions: int) -> int:
    """The most tokens that a model was made for, of which `positions` are in `max_position_embeddings`.

    A rope with the scaling "yarn" or "linear" reaches `factor` times as far as the original one, as in vLLM: users add
    the scaling and leave `max_position_embeddings` as it is. With other scalings, and in a GGUF file, which has the
    whole length, `positions` says it.
    """
    parameters = config.section("rope_scaling") or config.section("rope_parameters") or HFConfig({})
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind == "yarn":
        original = _original(parameters, config)
        reach = parameters.number("factor", positions / original) * original
    elif kind == "linear" and not config.flag("gguf"):
        reach = parameters.number("factor") * positions
    else:
        return positions
    return max(positions, int(min(reach, MAX_INTEGER)))


def _dims(config: HFConfig, part: float) -> int:
    """The number of elements of a head that are rotated; 0: all."""
    if part == 1.0:
        return 0
    default = config.integer("hidden_size") // config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", max(default, 1))
    dims = int(head_dim * part)
    if not 0 < dims <= head_dim or dims % 2 or head_dim % 2:
        raise config.unsupported("partial_rotary_factor", part, f"an even part of a head of {head_dim}")
    return dims


def _llama3(parameters: HFConfig, config: HFConfig, theta: float, dims: int) -> RopeSpec:
    spec = RopeSpec(
        theta=theta,
        scaling="llama3",
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_max_position=_original(parameters, config),
        dims=dims,
    )
    if spec.high_freq_factor <= spec.low_freq_factor:
        raise parameters.unsupported("high_freq_factor", spec.high_freq_factor, "above low_freq_factor")
    return spec


def _proportional(parameters: HFConfig, config: HFConfig, theta: float) -> RopeSpec:
    part, dims = parameters.number("partial_rotary_factor", 1.0, or_zero=True), config.integer("head_dim")
    if part > 1:
        raise parameters.unsupported("partial_rotary_factor", part, "at most 1")
    factor = parameters.number("factor", 1.0)
    return RopeSpec(theta=theta, scaling="proportional", factor=factor, turning=int(part * dims // 2))


def _original(parameters: HFConfig, config: HFConfig) -> int:
    name = "original_max_position_embeddings"
    default = config.get(name) if config.get(name) is not None else config.get("max_position_embeddings")
    return parameters.integer(name, default)


def _yarn(parameters: HFConfig, config: HFConfig, theta: float, dims: int) -> RopeSpec:
    original = _original(parameters, config)
    factor = parameters.number("factor", config.integer("max_position_embeddings") / original)
    scales = [parameters.number(name, 0.0, or_zero=True) for name in ("mscale", "mscale_all_dim")]

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    grows = grown(scales[0]) / grown(scales[1]) if all(scales) else grown(1.0)
    if theta <= 1.0:
        raise parameters.unsupported("rope_theta", theta, "above 1 with yarn")
    return RopeSpec(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position=original,
        dims=dims,
        attention_factor=parameters.number("attention_factor", grows),
        fast=parameters.number("beta_fast", 32.0),
        slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
    )


def _longrope(parameters: HFConfig, config: HFConfig, theta: float, dims: int) -> RopeSpec:
    original = _original(parameters, config)
    factor = parameters.number("factor", config.integer("max_position_embeddings") / original)
    heads = config.integer("hidden_size") // config.integer("num_attention_heads")
    count = (dims or config.integer("head_dim", max(heads, 1))) // 2
    grows = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeSpec(
        theta=theta,
        scaling="longrope",
        original_max_position=original,
        dims=dims,
        attention_factor=parameters.number("attention_factor", grows),
        short_factors=parameters.numbers("short_factor", count),
        long_factors=parameters.numbers("long_factor", count),
    )
