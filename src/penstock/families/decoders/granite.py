"""Granite 3: Llama with multipliers of the embedding, of scores, of what layers add, and of logits."""

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec
from penstock.families.spec import ModelSpec


def granite(config: HFConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    layer = layer_spec(
        config,
        attention_scale=config.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )
    return decoder_spec(
        config,
        "granite",
        layer,
        max_position=2048,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )
