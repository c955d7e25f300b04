"""MiniMax M2: all of q and all of k are normed, a part of each head is rotated, and a sigmoid and a bias choose the
experts of every layer."""

from dataclasses import replace

from penstock.families.experts import ExpertNames, moe_spec
from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec

_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts.",
    gate="w1",
    up="w3",
    down="w2",
    choice_bias="block_sparse_moe.e_score_correction_bias",
)


def minimax_m2(config: HFConfig) -> ModelSpec:
    if shared := config.integer("shared_intermediate_size", 0, least=0):
        raise config.unsupported("shared_intermediate_size", shared, "0")
    head = config.integer("head_dim", 128)
    layer = layer_spec(
        config,
        num_kv_heads=8,
        head_dim=128,
        rope_spec=rope(config, 5e6, partial=config.integer("rotary_dim", head) / head),
        qk_norm="whole" if config.flag("use_qk_norm", True) else "",
        intermediate_size=0,
    )
    moe = moe_spec(
        config, count=("num_local_experts", 256), per_token=8, size=("intermediate_size", 1536), normalize=True
    )
    count, further = num_layers(config), config.integer("num_mtp_modules", 0, least=0)
    return decoder_spec(
        config,
        "minimax_m2",
        replace(layer, moe=replace(moe, sigmoid=True, choice_bias=config.flag("use_routing_bias", True))),
        max_position=196_608,
        experts=_NAMES,
        unused=[f"model.layers.{count + i}.*" for i in range(further)],  # they predict tokens further on
    )
