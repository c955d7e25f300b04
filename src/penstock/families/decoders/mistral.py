"""Mistral, dense: Llama with, in some versions, a sliding window in every layer; Ministral, with one in some layers;
and Ministral 3, whose rope is YaRN, and whose queries are scaled by position."""

from dataclasses import replace

from penstock.config.facts import QueryTemperature
from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec


def mistral(config: HFConfig) -> ModelSpec:
    if len(set(config.texts("layer_types") or ())) > 1:
        raise config.unsupported("layer_types", "mixed", "one type in all layers (sliding_window, or null for none)")
    window = config.integer("sliding_window", 0, least=0)
    return decoder_spec(config, "mistral", layer_spec(config), [window] * num_layers(config))


def ministral(config: HFConfig) -> ModelSpec:
    count, window = num_layers(config), config.integer("sliding_window", 0, least=0)
    windows = layer_windows(config, count, window, [bool(window)] * count)
    return decoder_spec(config, "ministral", layer_spec(config), windows)


def ministral3(config: HFConfig, prefix: str = "") -> ModelSpec:
    turned, parameters = rope(config, 1e6), config.section("rope_parameters") or HFConfig({})
    if beta := parameters.number("llama_4_scaling_beta", 0.0, or_zero=True):
        every = parameters.integer("original_max_position_embeddings")
        turned = replace(turned, temperature=QueryTemperature(every, beta))
    window = config.integer("sliding_window", 0, least=0)
    layer = layer_spec(config, num_kv_heads=8, head_dim=128, rope_spec=turned)
    windows = [window] * num_layers(config)
    return decoder_spec(
        config, "ministral3", layer, windows, prefix=prefix, eps=("rms_norm_eps", 1e-5), max_position=262_144
    )
