"""GLM-4.5 and 4.6: mixtures of experts that a sigmoid and a bias choose, with shared experts, behind dense layers."""

from penstock.families.experts import ExpertNames, dense_first, grouped_routing, moe_spec, with_shared_experts
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
    moe = with_shared_experts(config, grouped_routing(config, routed, sigmoid=True), 1)
    return decoder_spec(
        config,
        "glm4_moe",
        dense_first(config, layer, moe, count, dense=1),
        eps=("rms_norm_eps", 1e-5),
        experts=ExpertNames(shared="mlp.shared_experts."),
        unused=[f"model.layers.{count}.*"],  # it predicts a token further on
    )
