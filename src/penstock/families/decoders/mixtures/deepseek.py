"""DeepSeek V2 and V3: latent attention, and mixtures of experts chosen by group, with shared ones, after dense MLPs."""

import math
from dataclasses import replace
from functools import partial

from penstock.families.experts import ExpertNames, dense_first, grouped_routing, moe_spec, with_shared_experts
from penstock.families.hf_config import HFConfig, activation
from penstock.families.kinds.latent import LatentSpec, latent_parameters
from penstock.families.llama_like import decoder_spec, num_layers
from penstock.families.rope_config import rope
from penstock.families.spec import LayerSpec, ModelSpec, MoESpec


def deepseek_v2(config: HFConfig) -> ModelSpec:
    if config.flag("norm_topk_prob"):  # transformers ignores it, and no published checkpoint has it
        raise config.unsupported("norm_topk_prob", True, "false for this architecture")
    config.one_of("scoring_func", "softmax")
    moe = _mixture(config, 64, normalize=False, shared=2, sigmoid=False)
    if config.one_of("topk_method", "greedy", "group_limited_greedy") == "greedy":
        moe = replace(moe, groups=1, kept_groups=1)
    return _spec(config, "deepseek_v2", moe, dense=0, interleaved=True, mlp_bias=config.flag("mlp_bias"))


def deepseek_v3(config: HFConfig) -> ModelSpec:
    config.one_of("scoring_func", "sigmoid")
    config.one_of("topk_method", "noaux_tc")
    config = config.renamed(n_routed_experts="num_local_experts")  # its name since transformers 5
    moe = _mixture(config, 256, normalize=config.flag("norm_topk_prob", True), shared=1, sigmoid=True)
    return _spec(config, "deepseek_v3", moe, dense=3, interleaved=config.flag("rope_interleave", True))


def _mixture(config: HFConfig, count: int, *, normalize: bool, shared: int, sigmoid: bool) -> MoESpec:
    experts, size = ("n_routed_experts", count), ("moe_intermediate_size", 1407)
    moe = moe_spec(config, count=experts, per_token=8, size=size, normalize=normalize)
    return with_shared_experts(config, grouped_routing(config, moe, sigmoid=sigmoid), shared)


def _spec(
    config: HFConfig, family: str, moe: MoESpec, *, dense: int, interleaved: bool, mlp_bias: bool = False
) -> ModelSpec:
    if config.integer("moe_layer_freq", 1) != 1:  # transformers ignores it
        raise config.unsupported("moe_layer_freq", config.get("moe_layer_freq"), "1")
    attention, act = _attention(config, interleaved=interleaved), activation(config, "hidden_act", "silu")
    layer = LayerSpec(attention, config.integer("intermediate_size"), kv_group=0, activation=act, mlp_bias=mlp_bias)
    count, further = num_layers(config), config.integer("num_nextn_predict_layers", 1, least=0)
    return decoder_spec(
        config,
        family,
        dense_first(config, layer, moe, count, dense),
        experts=ExpertNames(shared="mlp.shared_experts."),
        attention_parameters=partial(latent_parameters, divided=config.flag("gguf")),
        unused=[f"model.layers.{count + i}.*" for i in range(further)],  # they predict tokens further on
    )


def _attention(config: HFConfig, *, interleaved: bool) -> LatentSpec:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    rank, key, turned, value = (config.integer(name, size) for name, size in sizes.items())
    for name, size in (("kv_lora_rank", rank), ("qk_rope_head_dim", turned), ("v_head_dim", value)):
        if size % 16:
            raise config.unsupported(name, size, "a multiple of 16")
    scaling = config.section("rope_scaling") or config.section("rope_parameters") or HFConfig({})
    growth = scaling.number("mscale_all_dim", 0.0, or_zero=True)
    scale, factor = (key + turned) ** -0.5, scaling.number("factor", 1.0)
    if growth and factor > 1:
        scale *= (0.1 * growth * math.log(factor) + 1.0) ** 2
    return LatentSpec(
        num_heads=config.integer("num_attention_heads"),
        rank=rank,
        query_rank=config.integer("q_lora_rank", 0, least=0),
        key_dim=key,
        rope_dim=turned,
        value_dim=value,
        rope=rope(config, interleaved=interleaved),
        scale=scale,
        bias=config.flag("attention_bias"),
    )
