"""Qwen 2 and 2.5: biases on q, k and v; optionally a sliding window in the upper layers."""

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec, upper_layer_windows
from penstock.families.spec import ModelSpec


def qwen2(config: HFConfig) -> ModelSpec:
    return decoder_spec(config, "qwen2", layer_spec(config, qkv_bias=True), upper_layer_windows(config))
