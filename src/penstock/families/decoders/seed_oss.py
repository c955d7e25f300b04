"""Seed-OSS: Llama with biases on q, k and v, and heads whose size does not follow from the hidden size."""

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec
from penstock.families.spec import ModelSpec


def seed_oss(config: HFConfig) -> ModelSpec:
    layer = layer_spec(
        config,
        num_kv_heads=None if config.is_null("num_key_value_heads") else 8,
        head_dim=None if config.is_null("head_dim") else 128,
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
    )
    return decoder_spec(config, "seed_oss", layer, max_position=524_288)
