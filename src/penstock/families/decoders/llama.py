"""Llama 2 and 3.x, and models of the same shape."""

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec
from penstock.families.spec import ModelSpec


def llama(config: HFConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    layer = layer_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))
    return decoder_spec(config, "llama", layer)
