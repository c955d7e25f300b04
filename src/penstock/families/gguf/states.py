"""Reads the metadata of architectures whose layers keep states, and returns it as config.json has it.

Source: conversion/{qwen,granite,nemotron,mamba}.py of llama.cpp. The kind of a layer follows from its tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.families.experts import MAX_EXPERTS
from penstock.families.gguf.keys import SIGMOID, GgufKeys
from penstock.families.hf_config import UnsupportedModel

DELTA_NETS: Mapping[str, str] = {
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}


def _sizes(keys: GgufKeys, *, heads: str, groups: str, state: str, taps: str, head_dim: str) -> dict[str, Any]:
    """The sizes of a state, by the names of their fields in config.json."""
    count, width = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if width % count:
        raise keys.all.unsupported(keys.key("ssm.inner_size"), width, f"a multiple of ssm.time_step_rank ({count})")
    return {
        heads: count,
        groups: keys.integer("ssm.group_count"),
        state: keys.integer("ssm.state_size"),
        taps: keys.integer("ssm.conv_kernel"),
        head_dim: width // count,
    }


def _expand(keys: GgufKeys) -> int:
    """The width of values, as a multiple of the hidden size."""
    expand, rest = divmod(keys.integer("ssm.inner_size"), keys.integer("embedding_length"))
    if rest:
        raise keys.all.unsupported(
            keys.key("ssm.inner_size"), keys.get("ssm.inner_size"), "a multiple of the hidden size"
        )
    return expand


def _biases(keys: GgufKeys, convolution: str, projection: str) -> dict[str, bool]:
    kinds = {name.split(".", 2)[-1] for name in keys.tensors if ".ssm_" in name}
    return {convolution: "ssm_conv1d.bias" in kinds, projection: "ssm_in.bias" in kinds}


def _delta_net(keys: GgufKeys) -> dict[str, Any]:
    """Qwen3-Next and Qwen 3.5, with experts or dense."""
    count = keys.layers - keys.integer("nextn_predict_layers", 0, least=0)
    kinds = keys.kinds({"ssm_out.weight": "linear_attention"}, "full_attention", count)
    if keys.kinds({"ssm_in.weight": "old"}, "", 1) == ["old"]:
        raise UnsupportedModel(
            "blk.0.ssm_in.weight: inputs and gates are one tensor, as in older files; convert the model again, "
            "or name a newer file"
        )
    return {
        **_sizes(
            keys,
            heads="linear_num_value_heads",
            groups="linear_num_key_heads",
            state="linear_key_head_dim",
            taps="linear_conv_kernel_dim",
            head_dim="linear_value_head_dim",
        ),
        "architectures": [DELTA_NETS[keys.architecture]],
        "num_hidden_layers": count,
        "layer_types": kinds,
        **(_experts(keys) if keys.get("expert_count") else {}),
    }


def _experts(keys: GgufKeys) -> dict[str, Any]:
    return {
        "num_experts": keys.integer("expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def routed_experts(keys: GgufKeys, shared: int) -> dict[str, Any]:
    """The experts of which the router scales the output. `shared` experts see every token if the file does not say."""
    return {
        "n_routed_experts": keys.integer("expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", shared, least=0),
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def granite_multipliers(keys: GgufKeys) -> dict[str, float]:
    return {
        "attention_multiplier": keys.number("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _granite(keys: GgufKeys) -> dict[str, Any]:
    width, experts = max(keys.each("feed_forward_length")), keys.integer("expert_count", 0, least=0, most=MAX_EXPERTS)
    return {
        **_sizes(
            keys,
            heads="mamba_n_heads",
            groups="mamba_n_groups",
            state="mamba_d_state",
            taps="mamba_d_conv",
            head_dim="mamba_d_head",
        ),
        **_biases(keys, "mamba_conv_bias", "mamba_proj_bias"),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "mamba_expand": _expand(keys),
        "layer_types": keys.kinds({"ssm_in.weight": "mamba"}, "attention", keys.layers),
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else "nope",
        "attention_bias": any(name.endswith(".attn_q.bias") for name in keys.tensors),
        **granite_multipliers(keys),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count", 0, least=0),
        "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length", 0 if experts else width, least=0),
    }


def _nemotron_h(keys: GgufKeys) -> dict[str, Any]:
    parts = {
        "ssm_in.weight": "mamba",
        "attn_q.weight": "attention",
        "ffn_up.weight": "mlp",
        "ffn_gate_inp.weight": "moe",
    }
    count = keys.layers - keys.integer("nextn_predict_layers", 0, least=0)
    widths = {tensor.shape[0] for name, tensor in keys.tensors.items() if name.endswith(".ffn_up.weight")}
    config = {
        **_sizes(
            keys,
            heads="mamba_num_heads",
            groups="n_groups",
            state="ssm_state_size",
            taps="conv_kernel",
            head_dim="mamba_head_dim",
        ),
        **_biases(keys, "use_conv_bias", "use_bias"),
        "architectures": ["NemotronHForCausalLM"],
        "num_hidden_layers": count,
        "layers_block_type": keys.kinds(parts, "unknown", count),
        "intermediate_size": max(widths, default=None),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in keys.tensors),
    }
    if keys.architecture == "nemotron_h":
        return config
    keys.refuse("expert_gating_func", "Nemotron's experts are chosen by sigmoid", SIGMOID)
    return {
        **config,
        **routed_experts(keys, shared=1),
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "moe_latent_size": keys.integer("moe_latent_size", 0, least=0),
    }


def _mamba2(keys: GgufKeys) -> dict[str, Any]:
    names = {"heads": "num_heads", "groups": "n_groups", "state": "state_size", "taps": "conv_kernel"}
    return {
        **_sizes(keys, **names, head_dim="head_dim"),
        **_biases(keys, "use_conv_bias", "use_bias"),
        "architectures": ["Mamba2ForCausalLM"],
        "expand": _expand(keys),
    }


FAMILIES: Mapping[str, Callable[[GgufKeys], dict[str, Any]]] = {
    **dict.fromkeys(DELTA_NETS, _delta_net),
    "granitehybrid": _granite,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "mamba2": _mamba2,
}
