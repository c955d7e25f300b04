"""Reads the settings that only some architectures have from the metadata, and returns them as config.json has them."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.families.experts import MAX_EXPERTS
from penstock.families.gguf.keys import MAX_HEAD_DIM, SIGMOID, GgufKeys
from penstock.families.gguf.rope import rope_scaling, scaling_of
from penstock.families.gguf.states import DELTA_NETS, granite_multipliers, routed_experts
from penstock.families.gguf.states import FAMILIES as STATES
from penstock.families.hf_config import UnsupportedModel

# Architectures whose q, k and v are one tensor, those that rotate a part of a head, and those that may have a value for
# each layer.
FUSED = frozenset({"phi3", "gpt2", "gptneox", "falcon", "chatglm", *DELTA_NETS})
PARTIAL = frozenset({"phi3", "gptneox", "chatglm", "glm4", "glm4moe", *DELTA_NETS, "nemotron_h", "nemotron_h_moe"})
PER_LAYER = frozenset({*STATES, "gemma4"})


def _llama(keys: GgufKeys) -> dict[str, Any]:
    if keys.get("expert_count"):
        width = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": keys.integer("expert_count", most=MAX_EXPERTS),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "intermediate_size": width,
            "sliding_window": keys.get("attention.sliding_window"),
        }
    if keys.get("attention.sliding_window"):
        return _mistral(keys)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": keys.has("attn_q.bias"),
        "mlp_bias": keys.has("ffn_gate.bias"),
    }


def _llama4(keys: GgufKeys) -> dict[str, Any]:
    experts = keys.integer("expert_count", most=MAX_EXPERTS)
    return {
        "architectures": ["Llama4ForCausalLM"],
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.integer("feed_forward_length"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "use_qk_norm": experts != _EXPERTS_OF_MAVERICK,
    }


def _mistral(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["MistralForCausalLM"], "sliding_window": keys.get("attention.sliding_window")}


def _mistral3(keys: GgufKeys) -> dict[str, Any]:
    """Mistral Small 3.1, or Ministral 3, whose queries are scaled by position."""
    if not keys.get("attention.temperature_scale"):
        return _mistral(keys)
    beta = keys.number("attention.temperature_scale", 0.0)
    rope = {**(scaling_of(keys) or {}), "llama_4_scaling_beta": beta}
    return {"architectures": ["Ministral3ForCausalLM"], "rope_scaling": None, "rope_parameters": rope}


def _qwen2(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "attention_bias": keys.has("attn_q.bias")}


def _experts(keys: GgufKeys) -> dict[str, Any]:
    used = keys.integer("expert_used_count")
    return {
        "num_experts": keys.integer("expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer(
            "expert_feed_forward_length", max(keys.integer("feed_forward_length") // used, 1)
        ),
    }


def _qwen2_moe(keys: GgufKeys) -> dict[str, Any]:
    return {
        **_experts(keys),
        "architectures": ["Qwen2MoeForCausalLM"],
        "norm_topk_prob": False,
        "qkv_bias": keys.has("attn_q.bias"),
        "shared_expert_intermediate_size": keys.integer(
            "expert_shared_feed_forward_length", keys.integer("feed_forward_length")
        ),
    }


def _qwen3_moe(keys: GgufKeys) -> dict[str, Any]:
    return {
        **_experts(keys),
        "architectures": ["Qwen3MoeForCausalLM"],
        "norm_topk_prob": True,
        "attention_bias": keys.has("attn_q.bias"),
    }


def _layer_types(keys: GgufKeys, every: int) -> list[str]:
    """The type of each layer. Without a pattern in the file, every so manyth layer has full attention."""
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        sliding = [bool(slides) for slides in pattern]
    else:
        every = every if pattern is None else keys.integer("attention.sliding_window_pattern")
        sliding = [(layer + 1) % every != 0 for layer in range(keys.layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


def _gemma3(keys: GgufKeys) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    types = _layer_types(keys, 6) if window else ["full_attention"] * keys.layers
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": hidden // heads if keys.layers == _LAYERS_OF_27B else keys.head_dim,
        "sliding_window": window or None,
        "layer_types": types,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _gemma(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"]}


def _gemma2(keys: GgufKeys) -> dict[str, Any]:
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": hidden // heads if keys.layers == _LAYERS_OF_GEMMA2_27B else keys.head_dim,
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma4(keys: GgufKeys) -> dict[str, Any]:
    types, size = _layer_types(keys, 6), keys.integer("attention.key_length_swa", most=MAX_HEAD_DIM)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        keys.refuse(name, f"it is {size}, as attention.key_length_swa", size)
    kv_heads, widths = keys.each("attention.head_count_kv"), keys.each("feed_forward_length")
    far = {"rope_theta": keys.number("rope.freq_base", 1e6), **(scaling_of(keys) or {})}
    table = keys.tensors.get("per_layer_token_embd.weight")
    mixture = {
        "enable_moe_block": True,
        "num_experts": keys.integer("expert_count", 0, least=0, most=MAX_EXPERTS),
        "top_k_experts": keys.get("expert_used_count"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
    }
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "head_dim": size,
        "per_layer_config": {
            str(i): {"head_dim": keys.head_dim if kind == "full_attention" else size, "num_key_value_heads": count}
            for i, (kind, count) in enumerate(zip(types, kv_heads, strict=False))
        },
        "attention_k_eq_v": any(
            f"blk.{i}.attn_k.weight" in keys.tensors and f"blk.{i}.attn_v.weight" not in keys.tensors
            for i in range(keys.layers)
        ),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": types,
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", 0, least=0),
        "rope_parameters": {
            "full_attention": far,
            "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa", 10000.0)},
        },
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": table.shape[0] if table else None,
        **(mixture if mixture["num_experts"] else {}),
    }


def _granite(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["GraniteForCausalLM"], **granite_multipliers(keys)}


def _granite_moe(keys: GgufKeys) -> dict[str, Any]:
    shared = keys.integer("expert_shared_feed_forward_length", 0, least=0)
    return {
        **_granite(keys),
        "architectures": ["GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"],
        "num_local_experts": keys.integer("expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "shared_intermediate_size": shared,
    }


def _olmo2(keys: GgufKeys) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    if not window:
        return {"architectures": ["Olmo2ForCausalLM"]}
    return {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window, "layer_types": _layer_types(keys, 4)}


def _phi3(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": keys.get("attention.sliding_window")}


def _command_r(keys: GgufKeys) -> dict[str, Any]:
    scale, normed = keys.number("logit_scale", 1.0), keys.has("attn_q_norm.weight")
    return {"architectures": ["CohereForCausalLM"], "logit_scale": scale, "use_qk_norm": normed}


def _cohere2(keys: GgufKeys) -> dict[str, Any]:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "logit_scale": keys.number("logit_scale", 1.0),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _layer_types(keys, 4),
    }


def _glm(keys: GgufKeys) -> dict[str, Any]:
    """GLM-4 of 2024. Files made of its first checkpoints have q, k and v in one tensor, later ones in three."""
    fused, bias = keys.has("attn_qkv.weight"), keys.has("attn_q.bias") or keys.has("attn_qkv.bias")
    return {"architectures": ["GlmForCausalLM"], "attention_bias": bias, "fused_qkv": fused}


def _glm4(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["Glm4ForCausalLM"], "attention_bias": keys.has("attn_q.bias")}


def _glm4_moe(keys: GgufKeys) -> dict[str, Any]:
    keys.refuse("expert_gating_func", "GLM's experts are chosen by sigmoid", SIGMOID)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "num_hidden_layers": keys.layers - keys.integer("nextn_predict_layers", 0, least=0),
        "attention_bias": keys.has("attn_q.bias"),
        "use_qk_norm": keys.has("attn_q_norm.weight"),
        **routed_experts(keys, shared=1),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, least=0),
    }


def _deepseek2(keys: GgufKeys) -> dict[str, Any]:
    if keys.has("attn_kv_b.weight"):
        raise UnsupportedModel(
            "blk.0.attn_kv_b.weight: what makes keys and values is one tensor, as in files of before April 2025; "
            "convert the model again, or name a newer file"
        )
    groups, sigmoid = keys.integer("expert_group_count", 1), keys.get("expert_gating_func") == SIGMOID
    keys.refuse("expert_gating_func", "DeepSeek's experts are chosen by softmax or sigmoid", 0, 1, SIGMOID)
    rotated = keys.integer("rope.dimension_count")
    return {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0, least=0),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": keys.integer("attention.key_length_mla", least=rotated + 1) - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": keys.integer("attention.value_length_mla"),
        **routed_experts(keys, shared=0),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, least=0),
        "n_group": groups,
        "topk_group": keys.integer("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
    }


def _starcoder2(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["Starcoder2ForCausalLM"], "use_bias": keys.has("attn_q.bias")}


def _gpt2(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["GPT2LMHeadModel"], "n_inner": keys.integer("feed_forward_length")}


def _gpt_neox(keys: GgufKeys) -> dict[str, Any]:
    parallel, bias = keys.flag("use_parallel_residual", True), keys.has("attn_qkv.bias")
    return {"architectures": ["GPTNeoXForCausalLM"], "use_parallel_residual": parallel, "attention_bias": bias}


def _falcon(keys: GgufKeys) -> dict[str, Any]:
    return {
        "architectures": ["FalconForCausalLM"],
        "new_decoder_architecture": True,  # a file has q, k and v of all versions in one order
        "num_kv_heads": keys.integer("attention.head_count_kv", 1),
        "num_ln_in_parallel_attn": 2 if keys.has("attn_norm_2.weight") else 1,
        "bias": keys.has("attn_qkv.bias"),
        "ffn_hidden_size": keys.integer("feed_forward_length"),
    }


def _gpt_oss(keys: GgufKeys) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": keys.integer("expert_count", most=MAX_EXPERTS),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _layer_types(keys, 2),
        "rope_scaling": {**(rope_scaling(keys.all, keys.architecture) or {}), "truncate": False},
    }


def _smollm3(keys: GgufKeys) -> dict[str, Any]:
    return {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4}


def _seed_oss(keys: GgufKeys) -> dict[str, Any]:
    return {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": keys.has("attn_q.bias"),
        "attention_out_bias": keys.has("attn_output.bias"),
        "mlp_bias": keys.has("ffn_gate.bias"),
    }


_EXPERTS_OF_MAVERICK = 128  # the one Llama 4 whose heads are not normed, which files do not say
_LAYERS_OF_GEMMA2_27B = 46
_LAYERS_OF_27B = 62  # the one Gemma 3 whose attention has another scale, which files do not hold

FAMILIES: Mapping[str, Callable[[GgufKeys], dict[str, Any]]] = {
    "llama": _llama,
    "llama4": _llama4,
    "mistral3": _mistral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "phi3": _phi3,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "chatglm": _glm,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "deepseek2": _deepseek2,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "falcon": _falcon,
    "gpt-oss": _gpt_oss,
    **STATES,
}
