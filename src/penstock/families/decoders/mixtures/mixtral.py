"""Mixtral: Mistral with a mixture of experts in every layer."""

from dataclasses import replace

from penstock.families.experts import ExpertNames, moe_spec
from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers
from penstock.families.spec import ModelSpec

_NAMES = ExpertNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts.", gate="w1", up="w3", down="w2")


def mixtral(config: HFConfig) -> ModelSpec:
    moe = moe_spec(
        config, count=("num_local_experts", 8), per_token=2, size=("intermediate_size", None), normalize=True
    )
    layer = replace(layer_spec(config), intermediate_size=0, moe=moe)
    window = config.integer("sliding_window", 0, least=0)
    return decoder_spec(config, "mixtral", layer, [window] * num_layers(config), experts=_NAMES)
