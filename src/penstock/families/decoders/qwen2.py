"""Qwen 2 and 2.5, with biases on q, k and v, and optionally a sliding window in the upper layers; Qwen 1.5 MoE and
Qwen 2 MoE, with mixtures of experts and a shared expert for every token."""

from dataclasses import replace

from penstock.families.experts import ExpertNames, moe_spec, sparse_layers
from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers, upper_layer_windows
from penstock.families.spec import ModelSpec


def qwen2(config: HFConfig) -> ModelSpec:
    return decoder_spec(config, "qwen2", layer_spec(config, qkv_bias=True), upper_layer_windows(config))


def qwen2_moe(config: HFConfig) -> ModelSpec:
    routed = moe_spec(
        config,
        count=("num_experts", 60),
        per_token=4,
        size=("moe_intermediate_size", 1408),
        normalize=config.flag("norm_topk_prob"),
    )
    shared = config.integer("shared_expert_intermediate_size", 5632)
    moe = replace(routed, shared_intermediate_size=shared, shared_gate=True)
    count = num_layers(config)
    layers = sparse_layers(config, layer_spec(config, qkv_bias=config.flag("qkv_bias", True)), moe, count)
    window = config.integer("sliding_window", 4096) if config.flag("use_sliding_window") else 0
    below = config.integer("max_window_layers", 28, least=0)
    every_other = [bool(window) and i % 2 == 0 and i < below for i in range(count)]
    windows = layer_windows(config, count, window, every_other)
    return decoder_spec(config, "qwen2_moe", layers, windows, experts=ExpertNames())
