"""Qwen 3, dense: each head of q and k is normed, and the head's size is given."""

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec, upper_layer_windows
from penstock.families.spec import ModelSpec


def qwen3(config: HFConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    layer = layer_spec(config, head_dim=128, qk_norm=True, qkv_bias=bias, output_bias=bias)
    return decoder_spec(config, "qwen3", layer, upper_layer_windows(config))
