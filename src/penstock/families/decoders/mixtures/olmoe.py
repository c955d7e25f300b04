"""OLMoE: all of q and all of k are normed, and every layer has a mixture of experts."""

from dataclasses import replace

from penstock.families.experts import ExpertNames, moe_spec
from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec
from penstock.families.spec import ModelSpec


def olmoe(config: HFConfig) -> ModelSpec:
    config.refuse("clip_qkv", "queries, keys and values that are not clipped")
    moe = moe_spec(
        config,
        count=("num_experts", 64),
        per_token=8,
        size=("intermediate_size", 2048),
        normalize=config.flag("norm_topk_prob"),
    )
    bias = config.flag("attention_bias")
    layer = layer_spec(config, qkv_bias=bias, output_bias=bias, qk_norm="whole", intermediate_size=0)
    return decoder_spec(
        config,
        "olmoe",
        replace(layer, moe=moe),
        max_position=4096,
        eps=("rms_norm_eps", 1e-5),
        experts=ExpertNames(),
    )
