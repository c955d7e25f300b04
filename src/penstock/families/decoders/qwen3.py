"""Qwen 3: each head of q and k is normed, and the head's size is given. Qwen 3 MoE has mixtures of experts."""

from penstock.families.experts import ExpertNames, moe_spec, sparse_layers
from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers, upper_layer_windows
from penstock.families.spec import ModelSpec


def qwen3(config: HFConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    layer = layer_spec(config, head_dim=128, qk_norm="heads", qkv_bias=bias, output_bias=bias)
    return decoder_spec(config, "qwen3", layer, upper_layer_windows(config))


def qwen3_moe(config: HFConfig) -> ModelSpec:
    renamed = config.get("num_local_experts") is not None  # by transformers 5
    moe = moe_spec(
        config,
        count=("num_local_experts" if renamed else "num_experts", 128),
        per_token=8,
        size=("moe_intermediate_size", 768),
        normalize=config.flag("norm_topk_prob"),
    )
    bias, count = config.flag("attention_bias"), num_layers(config)
    layer = layer_spec(config, qk_norm="heads", qkv_bias=bias, output_bias=bias)
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window") else 0
    layers = sparse_layers(config, layer, moe, count)
    return decoder_spec(config, "qwen3_moe", layers, [window] * count, experts=ExpertNames())
