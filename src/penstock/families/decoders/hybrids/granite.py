"""Granite 3: Llama with multipliers of the embedding, of scores, of what layers add, and of logits. Granite 3 MoE, and
Granite 4, with Mamba 2 layers beside attention, and mixtures of experts beside a shared one, or that alone."""

from dataclasses import replace
from typing import Any

from penstock.families.decoders.hybrids.shared import layers_of_kinds, mamba_spec, parameters_of_kinds
from penstock.families.experts import ExpertNames, moe_spec
from penstock.families.hf_config import HFConfig
from penstock.families.kinds.states import mamba_parameters
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
    count = num_layers(config)
    kinds = config.texts("layer_types") or config.texts("layers_block_type") or ["mamba"] * count
    turned = config.get("position_embedding_type") == "rope"
    shared = config.integer("shared_intermediate_size", 1024)
    layer = _layer(config, rope_spec=rope(config) if turned else NO_ROPE, intermediate_size=shared)
    parameters = parameters_of_kinds("mamba", mamba_parameters)
    shared_names = NAMES if config.flag("gguf") else _SHARED  # llama.cpp's conversion divides what is fused
    names: dict[str, Any] = {"names": shared_names, "attention_parameters": parameters}
    if config.integer("num_local_experts", 8, least=0):
        layer, names = _mixture(config, layer), {"experts": _EXPERTS, "attention_parameters": parameters}
    states: dict[str, Any] = dict.fromkeys(("attention", "full_attention"))
    if not states.keys() >= {*kinds}:
        states |= dict.fromkeys(("mamba", "linear_attention"), mamba_spec(config, groups=1, state=256))
    return _spec(config, "granite_4", layers_of_kinds(config, [layer] * count, kinds, states), **names)


def _layer(config: HFConfig, **changes: Any) -> LayerSpec:
    bias, scale = config.flag("attention_bias"), config.number("attention_multiplier", 1.0)
    return layer_spec(config, attention_scale=scale, qkv_bias=bias, output_bias=bias, **changes)


def _mixture(config: HFConfig, layer: LayerSpec) -> LayerSpec:
    count, size = ("num_local_experts", 8), ("intermediate_size", None)
    moe = moe_spec(config, count=count, per_token=2, size=size, normalize=True)
    shared = config.integer("shared_intermediate_size", 0, least=0)
    return replace(layer, intermediate_size=0, moe=replace(moe, shared_intermediate_size=shared))


def _spec(config: HFConfig, family: str, layers: LayerSpec | list[LayerSpec], **names: Any) -> ModelSpec:
    return decoder_spec(
        config,
        family,
        layers,
        max_position=2048,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
        **names,
    )
