"""Granite 3: Llama with multipliers of the embedding, of scores, of what layers add, and of logits. Granite 3 MoE, and
Granite 4 where all layers are attention, with mixtures of experts beside a shared one, or with that alone."""

from dataclasses import replace
from typing import Any

from penstock.families.experts import ExpertNames, moe_spec
from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec, num_layers
from penstock.families.rope_config import NO_ROPE, rope
from penstock.families.spec import LayerSpec, ModelSpec

_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared="shared_mlp.",
    shared_fused=("input_linear", "output_linear"),
)
_SHARED = replace(NAMES, mlp="shared_mlp.", up=("input_linear",), down="output_linear")


def granite(config: HFConfig) -> ModelSpec:
    return _spec(config, "granite", _layer(config, mlp_bias=config.flag("mlp_bias")))


def granite_moe(config: HFConfig) -> ModelSpec:
    return _spec(config, "granite_moe", _mixture(config, _layer(config)), experts=_EXPERTS)


def granite_4(config: HFConfig) -> ModelSpec:
    for kind in config.texts("layer_types") or config.texts("layers_block_type") or ["mamba"] * num_layers(config):
        if kind not in ("attention", "full_attention"):
            raise config.unsupported("layer_types", kind, "attention in all layers; Mamba layers are not implemented")
    turned = config.get("position_embedding_type") == "rope"
    shared = config.integer("shared_intermediate_size", 1024)
    layer = _layer(config, rope_spec=rope(config) if turned else NO_ROPE, intermediate_size=shared)
    if not config.integer("num_local_experts", 8, least=0):
        return _spec(config, "granite_4", layer, names=_SHARED)
    return _spec(config, "granite_4", _mixture(config, layer), experts=_EXPERTS)


def _layer(config: HFConfig, **changes: Any) -> LayerSpec:
    bias, scale = config.flag("attention_bias"), config.number("attention_multiplier", 1.0)
    return layer_spec(config, attention_scale=scale, qkv_bias=bias, output_bias=bias, **changes)


def _mixture(config: HFConfig, layer: LayerSpec) -> LayerSpec:
    count, size = ("num_local_experts", 8), ("intermediate_size", None)
    moe = moe_spec(config, count=count, per_token=2, size=size, normalize=True)
    shared = config.integer("shared_intermediate_size", 0, least=0)
    return replace(layer, intermediate_size=0, moe=replace(moe, shared_intermediate_size=shared))


def _spec(config: HFConfig, family: str, layer: LayerSpec, **names: Any) -> ModelSpec:
    return decoder_spec(
        config,
        family,
        layer,
        max_position=2048,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
        **names,
    )
