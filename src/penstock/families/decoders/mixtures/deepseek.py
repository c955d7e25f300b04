"""DeepSeek V2 and V3: latent attention, and mixtures of experts chosen by group, with shared ones, after dense MLPs."""

import math
from dataclasses import replace
from functools import partial

from penstock.families.experts import ExpertNames, grouped_routing, moe_spec
from penstock.families.hf_config import HFConfig, activation
from penstock.families.kinds.latent import LatentSpec, latent_parameters
from penstock.families.llama_like import decoder_spec, num_layers
from penstock.families.rope_config import rope
from penstock.families.spec import LayerSpec, ModelSpec, MoESpec


def deepseek_v2(config: HFConfig) -> ModelSpec:
    if config.flag("norm_topk_prob"):  # transformers ignores it, and no published checkpoint has it
        raise config.unsupported("norm_topk_prob", True, "false for this architecture")
    _one_of(config, "scoring_func", "softmax")
    moe = _mixture(config, 64, normalize=False, shared=2)
    if _one_of(config, "topk_method", "greedy", "group_limited_greedy") == "greedy":
        moe = replace(moe, groups=1, kept_groups=1)
    return _spec(config, "deepseek_v2", moe, dense=0, interleaved=True, mlp_bias=config.flag("mlp_bias"))


def deepseek_v3(config: HFConfig) -> ModelSpec:
    _one_of(config, "scoring_func", "sigmoid")
    _one_of(config, "topk_method", "noaux_tc")
    config = config.renamed(n_routed_experts="num_local_experts")  # its name since transformers 5
    moe = _mixture(config, 256, normalize=config.flag("norm_topk_prob", True), shared=1)
    moe = replace(moe, sigmoid=True, by_pairs=True, choice_bias=True)
    return _spec(config, "deepseek_v3", moe, dense=3, interleaved=config.flag("rope_interleave", True))


def _one_of(config: HFConfig, name: str, *values: str) -> str:
    """Returns the field, by default the first of the values. Raises UnsupportedModel for a value that is not among
    them: transformers ignores the field."""
    if (value := config.text(name, values[0])) not in values:
        raise config.unsupported(name, value, " or ".join(values))
    return value


def _mixture(config: HFConfig, count: int, *, normalize: bool, shared: int) -> MoESpec:
    experts, size = ("n_routed_experts", count), ("moe_intermediate_size", 1407)
    moe = moe_spec(config, count=experts, per_token=8, size=size, normalize=normalize)
    width = moe.intermediate_size * config.integer("n_shared_experts", shared, least=0)
    return replace(grouped_routing(config, moe), shared_intermediate_size=width)


def _spec(
    config: HFConfig, family: str, moe: MoESpec, *, dense: int, interleaved: bool, mlp_bias: bool = False
) -> ModelSpec:
    if config.integer("moe_layer_freq", 1) != 1:  # transformers ignores it
        raise config.unsupported("moe_layer_freq", config.get("moe_layer_freq"), "1")
    count, first = num_layers(config), config.integer("first_k_dense_replace", dense, least=0)
    attention, act = _attention(config, interleaved=interleaved), activation(config, "hidden_act", "silu")
    layer = LayerSpec(attention, config.integer("intermediate_size"), kv_group=0, activation=act, mlp_bias=mlp_bias)
    sparse = replace(layer, intermediate_size=0, moe=moe, mlp_bias=False)
    layers = [layer if i < first else sparse for i in range(count)]
    names = ExpertNames(shared="mlp.shared_experts.")
    parameters = partial(latent_parameters, divided=config.flag("gguf"))
    spec = decoder_spec(config, family, layers, experts=names, attention_parameters=parameters)
    # The layers after the last one predict tokens further on. They are not used.
    extra = tuple(f"model.layers.{count + i}.*" for i in range(config.integer("num_nextn_predict_layers", 1, least=0)))
    return replace(spec, ignored_tensors=(*spec.ignored_tensors, *extra))


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
