"""GLM-4.5 and 4.6: mixtures of experts that a sigmoid and a bias choose, with shared experts, behind dense layers."""

from dataclasses import replace

from penstock.families.experts import ExpertNames, grouped_routing, moe_spec
from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec


def glm4_moe(config: HFConfig) -> ModelSpec:
    config, count = config.renamed(n_routed_experts="num_local_experts"), num_layers(config)  # as transformers 5 has it
    layer = layer_spec(
        config,
        num_kv_heads=8,
        rope_spec=rope(config, partial=0.5),
        qkv_bias=config.flag("attention_bias"),
        qk_norm="heads" if config.flag("use_qk_norm") else "",
    )
    routed = moe_spec(
        config,
        count=("n_routed_experts", 128),
        per_token=8,
        size=("moe_intermediate_size", 1408),
        normalize=config.flag("norm_topk_prob", True),
    )
    moe = replace(
        grouped_routing(config, routed),
        sigmoid=True,
        by_pairs=True,
        choice_bias=True,
        shared_intermediate_size=routed.intermediate_size * config.integer("n_shared_experts", 1, least=0),
    )
    sparse, dense = replace(layer, intermediate_size=0, moe=moe), config.integer("first_k_dense_replace", 1, least=0)
    layers = [layer if i < dense else sparse for i in range(count)]
    names = ExpertNames(shared="mlp.shared_experts.")
    spec = decoder_spec(config, "glm4_moe", layers, eps=("rms_norm_eps", 1e-5), experts=names)
    # The layer after the last one predicts a token further on. It is not used.
    return replace(spec, ignored_tensors=(*spec.ignored_tensors, f"model.layers.{count}.*"))
