"""OLMo 2 and 3, and EXAONE 4: q and k are normed, and so are the outputs of attention and MLP instead of their inputs.
OLMo norms all of q and all of k, EXAONE each head. OLMo 3 has window layers, whose rope is not scaled. If EXAONE 4 has
them, its full layers see no positions."""

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.kinds.attention import QKNorm, RopeSpec
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec, num_layers, with_attention
from penstock.families.rope_config import NO_ROPE, rope, rope_of_layers
from penstock.families.spec import LayerSpec, ModelSpec

_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_MODEL: dict[str, Any] = {"names": replace(NAMES, norms=_NORMS), "eps": ("rms_norm_eps", 1e-5), "max_position": 2048}


def olmo2(config: HFConfig) -> ModelSpec:
    return decoder_spec(config, "olmo2", _layer(config, rope(config)), **_MODEL)


def olmo3(config: HFConfig) -> ModelSpec:
    count, kinds = num_layers(config), ("full_attention", "sliding_attention")
    of_layers = partial(rope_of_layers, config, theta=config.number("rope_theta", 5e5))
    full, sliding = (
        of_layers(kind, scaling=config.section("rope_scaling") if i == 0 else None) for i, kind in enumerate(kinds)
    )
    by_default = [(i + 1) % 4 != 0 for i in range(count)]
    windows = layer_windows(config, count, config.integer("sliding_window", 4096), by_default)
    return decoder_spec(config, "olmo3", [_layer(config, sliding if w else full) for w in windows], windows, **_MODEL)


def exaone4(config: HFConfig) -> ModelSpec:
    turned, count = _layer(config, rope(config), "heads"), num_layers(config)
    if config.is_null("sliding_window"):
        return decoder_spec(config, "exaone4", turned, **_MODEL)
    plain = with_attention(turned, rope=NO_ROPE)
    every = 4 if config.texts("layer_types") else config.integer("sliding_window_pattern", 4)
    by_default = [(i + 1) % every != 0 for i in range(count)]
    windows = layer_windows(config, count, config.integer("sliding_window", 4096), by_default)
    return decoder_spec(config, "exaone4", [turned if each else plain for each in windows], windows, **_MODEL)


def _layer(config: HFConfig, turned: RopeSpec, qk_norm: QKNorm = "whole") -> LayerSpec:
    bias = config.flag("attention_bias")
    return layer_spec(
        config,
        rope_spec=turned,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        pre_norms=False,
        post_norms=True,
    )
