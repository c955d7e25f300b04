"""Qwen3-Next and Qwen 3.5 (text): three of four layers are gated delta nets, the others attention with a gate; with
mixtures of experts and a shared one, or dense."""

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.families.decoders.hybrids.shared import after_last, layers_of_kinds, parameters_of_kinds
from penstock.families.experts import ExpertNames, moe_spec, sparse_layers
from penstock.families.hf_config import HFConfig
from penstock.families.kinds.states import RecurrentSpec, delta_net_parameters
from penstock.families.llama_like import NAMES, TensorNames, decoder_spec, layer_spec, num_layers, with_attention
from penstock.families.rope_config import rope
from penstock.families.spec import LayerSpec, ModelSpec, MoESpec


def qwen3_next(config: HFConfig) -> ModelSpec:
    moe = _mixture(config, 512, 10, normalize=config.flag("norm_topk_prob", True))
    layer = _layer(config, config.integer("intermediate_size", 5632))
    return _spec(config, "qwen3_next", sparse_layers(config, layer, moe, num_layers(config)), by_key_head=True)


def qwen3_5(config: HFConfig, names: TensorNames = NAMES) -> ModelSpec:
    layer = _layer(config, config.integer("intermediate_size", 12288))
    return _spec(config, "qwen3_5", [layer] * num_layers(config), by_key_head=False, names=names)


def qwen3_5_moe(config: HFConfig, names: TensorNames = NAMES) -> ModelSpec:
    layer = replace(_layer(config, 0), moe=_mixture(config, 256, 8, normalize=True))
    return _spec(config, "qwen3_5_moe", [layer] * num_layers(config), by_key_head=False, names=names)


def _layer(config: HFConfig, width: int) -> LayerSpec:
    bias, turned = config.flag("attention_bias"), rope(config, partial=0.25)
    projections: dict[str, Any] = {"qk_norm": "heads", "qkv_bias": bias, "output_bias": bias}
    layer = layer_spec(config, head_dim=256, rope_spec=turned, intermediate_size=width, **projections)
    return with_attention(layer, gate=True)


def _mixture(config: HFConfig, count: int, per_token: int, *, normalize: bool) -> MoESpec:
    number, size = ("num_experts", count), ("moe_intermediate_size", 512)
    moe = moe_spec(config, count=number, per_token=per_token, size=size, normalize=normalize)
    shared = config.integer("shared_expert_intermediate_size", 512)
    return replace(moe, shared_intermediate_size=shared, shared_gate=True)


def _spec(
    config: HFConfig, family: str, layers: list[LayerSpec], *, by_key_head: bool, names: TensorNames = NAMES
) -> ModelSpec:
    tiled = config.flag("gguf") and not by_key_head  # llama.cpp's conversion of Qwen 3.5 changes the heads' order
    net, every = replace(_delta_net(config), tiled=tiled), config.integer("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(len(layers))]
    kinds = config.texts("layer_types") or default
    layers = layers_of_kinds(config, layers, kinds, {"linear_attention": net, "full_attention": None})
    made = parameters_of_kinds(
        "linear_attn", partial(delta_net_parameters, by_key_head=by_key_head, divided=config.flag("gguf"))
    )
    return decoder_spec(
        config,
        family,
        layers,
        norm_offset=1.0,
        names=names,
        experts=ExpertNames(),
        attention_parameters=made,
        unused=("mtp.*", *after_last(config, names.layers, len(layers))),
    )


def _delta_net(config: HFConfig) -> RecurrentSpec:
    keys, values = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if values % keys:
        raise config.unsupported("linear_num_value_heads", values, f"a multiple of linear_num_key_heads ({keys})")
    sizes = config.integer("linear_key_head_dim", 128), config.integer("linear_value_head_dim", 128)
    taps = config.integer("linear_conv_kernel_dim", 4, least=2)
    return RecurrentSpec(keys, values, *sizes, taps=taps, norm_groups=values)
