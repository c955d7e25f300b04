"""Cohere's Command R and R+ (1), and Command R7B and A (2): attention and MLP in parallel behind one LayerNorm without
a bias. R+ norms heads in the same way. The second have window layers, and their full layers see no positions."""

from dataclasses import replace
from typing import Any

from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec, num_layers, with_attention
from penstock.families.rope_config import NO_ROPE, rope
from penstock.families.spec import LayerSpec, ModelSpec

_NAMES = replace(NAMES, norms={"attention_norm": "input_layernorm"})


def cohere(config: HFConfig) -> ModelSpec:
    layer = _layer(config, 5e5)
    if config.flag("use_qk_norm"):
        layer = with_attention(layer, qk_norm="centered")
    return decoder_spec(config, "cohere", layer, max_position=8192, **_model(config))


def cohere2(config: HFConfig) -> ModelSpec:
    count, turned = num_layers(config), _layer(config, 1e4)
    plain = with_attention(turned, rope=NO_ROPE)
    every = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 4))
    by_default = [(i + 1) % every != 0 for i in range(count)]
    windows = layer_windows(config, count, config.integer("sliding_window", 4096), by_default)
    layers = [turned if window else plain for window in windows]
    return decoder_spec(config, "cohere2", layers, windows, max_position=8192, **_model(config))


def _layer(config: HFConfig, theta: float) -> LayerSpec:
    bias = config.flag("attention_bias")
    turned = rope(config, theta, interleaved=True)
    return layer_spec(config, rope_spec=turned, qkv_bias=bias, output_bias=bias, parallel=True, shared_norm=True)


def _model(config: HFConfig) -> dict[str, Any]:
    return {
        "layer_norm": True,
        "eps": ("layer_norm_eps", 1e-5),
        "logit_scale": config.number("logit_scale", 0.0625),
        "tied": True,
        "names": _NAMES,
    }
