"""Phi 3, 3.5, 4 and 4-mini: Llama with fused projections; in some, part of a head is rotated, and rope is for long
contexts."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec, num_layers
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec

_NAMES = replace(NAMES, heads=("qkv_proj",), up=("gate_up_proj",))


def phi3(config: HFConfig) -> ModelSpec:
    scaling = config.section("rope_scaling")
    if scaling is not None and scaling.get("type") == "yarn":  # the name of longrope in early files
        config = config.with_section("rope_scaling", type="longrope", rope_type="longrope")
    layer = layer_spec(config, rope_spec=rope(config, partial=1.0))
    window = config.integer("sliding_window", 0, least=0)
    windows = [window] * num_layers(config)
    return decoder_spec(config, "phi3", layer, windows, eps=("rms_norm_eps", 1e-5), max_position=4096, names=_NAMES)
