"""Gemma 1, and Gemma 2: window and full layers in turn, norms on both sides, and bounded scores and logits."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers
from penstock.families.spec import ModelSpec


def gemma(config: HFConfig) -> ModelSpec:
    config.refuse("use_bidirectional_attention", "a decoder's attention is causal")
    bias = config.flag("attention_bias")
    layer = layer_spec(config, head_dim=256, act=("hidden_act", "gelu_pytorch_tanh"), qkv_bias=bias, output_bias=bias)
    if layer.activation == "gelu":  # so the first files name it, and mean the approximation
        layer = replace(layer, activation="gelu_tanh")
    scale = config.integer("hidden_size") ** 0.5
    return decoder_spec(config, "gemma", layer, tied=True, norm_offset=1.0, embedding_scale=scale)


def gemma2(config: HFConfig) -> ModelSpec:
    config.refuse("use_bidirectional_attention", "a decoder's attention is causal")
    bias, count = config.flag("attention_bias"), num_layers(config)
    layer = layer_spec(
        config,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        act=("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        post_norms=True,
    )
    window = 0 if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
    every_other = [bool(window) and i % 2 == 0 for i in range(count)]
    return decoder_spec(
        config,
        "gemma2",
        layer,
        layer_windows(config, count, window, every_other),
        tied=True,
        norm_offset=1.0,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=_softcap(config, "final_logit_softcapping", 30.0),
    )


def _softcap(config: HFConfig, name: str, default: float) -> float:
    return 0.0 if config.is_null(name) else config.number(name, default)
